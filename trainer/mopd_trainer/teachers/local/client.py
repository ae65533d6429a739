"""``LocalTeacher``: the client of an in-process teacher.

Waiting calls for the same teacher are scored together, so that its weights are loaded once.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mopd_client.services.expectation import Expectation
from mopd_client.tokenizers.teacher import rejections_of
from mopd_client.transport.counters import Counters
from mopd_losses.topk.full_vocabulary import HiddenScore
from mopd_protocol.errors import TeacherError
from mopd_protocol.manifest import Manifest
from mopd_protocol.request_tokenizer import TeacherTokenizer, TokenizedSequence
from mopd_protocol.requests import LogprobsDtype, SequenceRequest
from mopd_protocol.samples import TeacherScore
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.teachers.local.manifest import LocalIdentity
from mopd_trainer.teachers.local.model import LocalScore, LocalTask, ScoreOptions
from mopd_trainer.teachers.local.residency import LocalTeachers


@dataclass(frozen=True, eq=False)
class _Call:
    """Sequences that wait to be scored."""

    sequences: Sequence[SequenceRequest]
    options: ScoreOptions
    scores: "asyncio.Future[list[TeacherScore]]"


class TeacherLock:
    """Lock of the local teachers: the weights of one are loaded at a time."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.models: LocalTeachers | None = None
        """Set after the handshakes of all teachers."""


class LocalTeacher:
    """One local teacher: an ``ScoringClient``.

    Tokenizer and checks are those of a stock server's client; scores are not cached.

    Args:
        device: device type for scoring.
    """

    def __init__(self, name: str, config: TeacherConfig, lock: TeacherLock, *, device: str) -> None:
        self.name = name
        self.counters = Counters()
        self._config = config
        self._lock = lock
        self._device = device
        self._identity: LocalIdentity | None = None
        self._waiting: list[_Call] = []

    @property
    def path(self) -> None:
        """None: no server."""
        return None

    async def wait_until_ready(self, deadline_seconds: float) -> None:
        """Load manifest and tokenizer.

        Raises:
            ConfigError: as ``LocalIdentity.read``.
        """
        if self._identity is None:
            self._identity = await asyncio.to_thread(
                LocalIdentity.read, self.name, self._config, self._device
            )

    async def handshake(self, expectation: Expectation | None = None) -> Manifest:
        """Return the manifest.

        Raises:
            ConfigError: when the teacher does not support what ``expectation`` needs.
            DataError: when the manifest is not the expected one.
        """
        manifest = (await self._loaded_identity()).manifest
        if expectation is not None:
            expectation.check(self.name, manifest)
        return manifest

    async def tokenizer(self) -> TeacherTokenizer:
        """Return the tokenizer."""
        return (await self._loaded_identity()).tokenizer

    async def score(
        self,
        sequences: Sequence[SequenceRequest],
        *,
        top_k: int,
        temperature: float = 1.0,
        logprobs_dtype: LogprobsDtype = "float32",
    ) -> list[TeacherScore]:
        """Return one score per sequence, in order; ``logprobs_dtype`` has no effect in process.

        Raises:
            TeacherError: when a sequence is invalid, as a service would report it.
        """
        if not sequences:
            return []
        await self._loaded_identity()
        started = time.perf_counter()
        self.counters.requests += 1
        options = ScoreOptions(top_k, temperature, self._config.support == "full")
        call = _Call(sequences, options, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        await asyncio.sleep(0)  # let concurrent calls join this batch
        async with self._lock.lock:
            if not call.scores.done():
                await self._score_waiting()
        try:
            scores = call.scores.result()
        except TeacherError:
            self.counters.failures += 1
            raise
        self.counters.seconds.append(time.perf_counter() - started)
        self.counters.tokens_scored += sum(len(score.completion) for score in scores)
        return scores

    async def aclose(self) -> None:
        """Do nothing: no connection is open."""

    async def _loaded_identity(self) -> LocalIdentity:
        await self.wait_until_ready(0.0)
        assert self._identity is not None
        return self._identity

    async def _score_waiting(self) -> None:
        """Score all waiting calls; a cancelled call waits for the scoring thread."""
        calls, self._waiting = self._waiting, []
        scoring = asyncio.ensure_future(asyncio.to_thread(self._score_calls, calls))
        try:
            results = await asyncio.shield(scoring)
        except asyncio.CancelledError:
            await asyncio.gather(scoring, return_exceptions=True)
            raise
        for call, result in zip(calls, results, strict=True):
            if call.scores.cancelled():
                continue
            if isinstance(result, TeacherError):
                call.scores.set_exception(result)
            else:
                call.scores.set_result(result)

    def _score_calls(self, calls: Sequence[_Call]) -> list[list[TeacherScore] | TeacherError]:
        """Return the scores of each call; an invalid sequence fails only its own call."""
        tokenized: list[list[TokenizedSequence] | TeacherError] = []
        tasks: list[LocalTask] = []
        for call in calls:
            try:
                with rejections_of(self.name):
                    tokens = [self._tokens(sequence) for sequence in call.sequences]
            except TeacherError as error:
                tokenized.append(error)
            else:
                tokenized.append(tokens)
                tasks += [_task(sequence) for sequence in tokens]
        assert self._lock.models is not None  # loaded before the first step
        scores = iter(self._lock.models.score(self.name, tasks, calls[0].options))
        return [
            each if isinstance(each, TeacherError) else [self._score(t, next(scores)) for t in each]
            for each in tokenized
        ]

    def _tokens(self, sequence: SequenceRequest) -> TokenizedSequence:
        assert self._identity is not None
        tokens = self._identity.tokenizer.tokenize(sequence)
        tokens.require_length(self._identity.manifest.max_model_len)
        return tokens

    def _score(self, tokens: TokenizedSequence, scored: LocalScore) -> TeacherScore:
        assert self._identity is not None
        manifest_id = self._identity.manifest.manifest_id
        if scored.hidden is None:
            return TeacherScore(manifest_id, tokens.completion, scored.topk)
        return HiddenScore(manifest_id, tokens.completion, scored.topk, scored.hidden)


def _task(tokens: TokenizedSequence) -> LocalTask:
    return LocalTask(tokens.prompt_ids, tokens.completion.token_ids, tokens.candidate_ids)
