"""``CapturingClient``: a teacher's client that keeps new scores until the block is stored."""

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from http import HTTPStatus

from mopd_client.pool import ScoringClient
from mopd_client.score_store import ScoreKey
from mopd_client.services.expectation import Expectation
from mopd_client.transport.counters import Counters
from mopd_protocol.errors import TeacherError
from mopd_protocol.manifest import Manifest
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_protocol.requests import LogprobsDtype, LogprobsRequest, SequenceRequest
from mopd_protocol.samples import TeacherScore
from mopd_trainer.teachers.stored.folder import Rejection, ScoreFolder

#: Scores of one block, by teacher.
Captured = dict[str, dict[ScoreKey, TeacherScore | Rejection]]

#: Of the block that the running task scores.
captured: ContextVar[Captured] = ContextVar("captured")

_REJECTING = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)


class CapturingClient:
    """A ``ScoringClient`` that adds new scores to ``captured`` and requests none twice.

    Where a request has one invalid sequence, its sequences are sent one by one.
    """

    def __init__(self, name: str, client: ScoringClient, manifest: Manifest) -> None:
        self._name = name
        self._client = client
        self._manifest_id = manifest.manifest_id
        self.folder: ScoreFolder | None = None
        """Set once the output folder is open."""

    @property
    def counters(self) -> Counters:
        """See ``ScoringClient``."""
        return self._client.counters

    @property
    def path(self) -> str | None:
        """See ``ScoringClient``."""
        return self._client.path

    async def wait_until_ready(self, deadline_seconds: float) -> None:
        """See ``ScoringClient``."""
        await self._client.wait_until_ready(deadline_seconds)

    async def handshake(self, expectation: Expectation | None = None) -> Manifest:
        """See ``ScoringClient``."""
        return await self._client.handshake(expectation)

    async def tokenizer(self) -> TeacherTokenizer:
        """See ``ScoringClient``."""
        return await self._client.tokenizer()

    async def score(
        self,
        sequences: Sequence[SequenceRequest],
        *,
        top_k: int,
        temperature: float = 1.0,
        logprobs_dtype: LogprobsDtype = "float32",
    ) -> list[TeacherScore]:
        """Return the scores; those of earlier blocks are read.

        Raises:
            TeacherError: if the teacher fails or rejects a sequence; all others are captured.
        """
        if not sequences:
            return []
        options = LogprobsRequest(
            sequences=list(sequences[:1]),
            top_k=top_k,
            temperature=temperature,
            logprobs_dtype=logprobs_dtype,
        )
        keys = [ScoreKey.of(self._manifest_id, options, each) for each in sequences]
        own = captured.get().setdefault(self._name, {})
        known = dict(own)
        if self.folder is not None:
            stored = await asyncio.to_thread(self.folder.read, [k for k in keys if k not in own])
            known |= {
                key: score
                for key, score in zip([k for k in keys if k not in own], stored, strict=True)
                if score is not None
            }
        new = {key: each for key, each in zip(keys, sequences, strict=True) if key not in known}
        if new:
            own |= (received := await self._request(new, options))
            known |= received
        scores = [known[key] for key in keys]
        for score in scores:
            if isinstance(score, Rejection):
                raise TeacherError(score.reason, status=score.status)
        return [score for score in scores if isinstance(score, TeacherScore)]

    async def _request(
        self, sequences: dict[ScoreKey, SequenceRequest], options: LogprobsRequest
    ) -> dict[ScoreKey, TeacherScore | Rejection]:
        try:
            scores = await self._client.score(
                [*sequences.values()],
                top_k=options.top_k,
                temperature=options.temperature,
                logprobs_dtype=options.logprobs_dtype,
            )
        except TeacherError as error:
            if error.status is None or error.status not in _REJECTING:
                raise
            if len(sequences) == 1:
                return {key: Rejection(error.status, str(error)) for key in sequences}
            parts = [await self._request({k: each}, options) for k, each in sequences.items()]
            return {key: score for part in parts for key, score in part.items()}
        return dict(zip(sequences, scores, strict=True))

    async def aclose(self) -> None:
        """See ``ScoringClient``."""
        await self._client.aclose()
