"""``LocalTeacher``: a teacher in this process, asked as one behind a service is.

Calls that wait for the same teacher are answered together, so that it is woken once for them.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

import numpy as np

from mopd_client.services.expectation import Expectation
from mopd_client.tokenizers.sequence_tokens import SequenceTokens, require_length, sequence_tokens
from mopd_client.tokenizers.teacher import TeacherTokenizer
from mopd_client.transport.counters import Counters
from mopd_losses.topk.full_vocabulary import HiddenScore
from mopd_protocol.errors import DataError, TeacherError
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsDtype, SequenceRequest
from mopd_protocol.samples import TeacherScore
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.teachers.local.manifest import LocalIdentity
from mopd_trainer.teachers.local.model import LocalScore, LocalTask, Question
from mopd_trainer.teachers.local.residency import LocalTeachers


@dataclass(frozen=True, eq=False)
class _Call:
    """Sequences that wait for their teacher's turn."""

    sequences: Sequence[SequenceRequest]
    question: Question
    answer: "asyncio.Future[list[TeacherScore]]"


class TeacherLock:
    """Whose turn it is: one local teacher is awake at a time."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.models: LocalTeachers | None = None
        """Set when they are loaded, which is after all teachers have introduced themselves."""


class LocalTeacher:
    """One local teacher: an ``ScoringClient``. Its tokenizer and its checks are those that a stock
    server is asked with; its scores are not cached.

    Args:
        device: the kind of device that it will be awake on.
    """

    def __init__(self, name: str, config: TeacherConfig, turn: TeacherLock, *, device: str) -> None:
        self.name = name
        self.counters = Counters()
        self._config = config
        self._turn = turn
        self._device = device
        self._identity: LocalIdentity | None = None
        self._waiting: list[_Call] = []

    @property
    def path(self) -> None:
        """There is no server."""
        return None

    async def wait_until_ready(self, deadline_seconds: float) -> None:
        """Reads who it is.

        Raises:
            ConfigError: as ``LocalIdentity.read``.
        """
        if self._identity is None:
            self._identity = await asyncio.to_thread(
                LocalIdentity.read, self.name, self._config, self._device
            )

    async def handshake(self, expectation: Expectation | None = None) -> Manifest:
        """Who it is.

        Raises:
            ConfigError: when it cannot do what ``expectation`` asks.
            DataError: when it is another teacher than ``expectation`` names.
        """
        manifest = (await self._known()).manifest
        if expectation is not None:
            expectation.check(self.name, manifest)
        return manifest

    async def tokenizer(self) -> TeacherTokenizer:
        """Its tokenizer."""
        return (await self._known()).tokenizer

    async def score(
        self,
        sequences: Sequence[SequenceRequest],
        *,
        top_k: int,
        temperature: float = 1.0,
        logprobs_dtype: LogprobsDtype = "float32",
    ) -> list[TeacherScore]:
        """One score for each sequence, in their order. ``logprobs_dtype`` is about the wire, and
        there is none.

        Raises:
            TeacherError: as a service refuses.
        """
        if not sequences:
            return []
        await self._known()
        began = time.perf_counter()
        self.counters.requests += 1
        question = Question(top_k, temperature, self._config.support == "full")
        call = _Call(sequences, question, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        await asyncio.sleep(0)  # whoever asks at this moment is waiting too
        async with self._turn.lock:
            if not call.answer.done():
                await self._answer_all()
        try:
            scores = call.answer.result()
        except TeacherError:
            self.counters.failures += 1
            raise
        self.counters.seconds.append(time.perf_counter() - began)
        self.counters.tokens_scored += sum(len(score.completion) for score in scores)
        return scores

    async def aclose(self) -> None:
        """Nothing is open."""

    async def _known(self) -> LocalIdentity:
        await self.wait_until_ready(0.0)
        assert self._identity is not None
        return self._identity

    async def _answer_all(self) -> None:
        """Every call that waits; a call that is cancelled waits for the thread that works on it."""
        calls, self._waiting = self._waiting, []
        working = asyncio.ensure_future(asyncio.to_thread(self._answers, calls))
        try:
            answers = await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.gather(working, return_exceptions=True)
            raise
        for call, answer in zip(calls, answers, strict=True):
            if call.answer.cancelled():
                continue
            if isinstance(answer, TeacherError):
                call.answer.set_exception(answer)
            else:
                call.answer.set_result(answer)

    def _answers(self, calls: Sequence[_Call]) -> list[list[TeacherScore] | TeacherError]:
        """One for each call: a refused sequence refuses its own call alone."""
        asked: list[list[SequenceTokens] | TeacherError] = []
        tasks: list[LocalTask] = []
        for call in calls:
            try:
                tokens = [self._tokens(sequence) for sequence in call.sequences]
                own = [self._task(*pair) for pair in zip(call.sequences, tokens, strict=True)]
            except TeacherError as error:
                asked.append(error)
            else:
                asked.append(tokens)
                tasks += own
        assert self._turn.models is not None  # loaded before the first step
        scores = iter(self._turn.models.score(self.name, tasks, calls[0].question))
        return [
            found
            if isinstance(found, TeacherError)
            else [self._score(t, next(scores)) for t in found]
            for found in asked
        ]

    def _tokens(self, sequence: SequenceRequest) -> SequenceTokens:
        assert self._identity is not None
        tokens = sequence_tokens(self.name, self._identity.tokenizer, sequence)
        require_length(self.name, tokens, self._identity.manifest)
        return tokens

    def _task(self, sequence: SequenceRequest, tokens: SequenceTokens) -> LocalTask:
        assert self._identity is not None
        rows = sequence.candidate_ids
        if rows is not None:
            try:
                for row in rows:
                    self._identity.tokenizer.table.require_known(np.array(row, dtype=np.int64))
            except DataError as error:
                raise self._refusal(f"candidate_ids: {error}") from error
            if len(rows) != len(tokens.completion):
                raise self._refusal(
                    f"candidate_ids has {len(rows)} rows, expected {len(tokens.completion)}: one a "
                    "completion token, the end-of-turn token included"
                )
            rows = [list(dict.fromkeys(row)) for row in rows]
        prompt = np.array(tokens.prompt_ids, dtype=np.int32)
        return LocalTask(prompt, tokens.completion.token_ids, rows)

    def _refusal(self, reason: str) -> TeacherError:
        return TeacherError(
            f"teacher {self.name!r} cannot be asked: {reason}", status=HTTPStatus.BAD_REQUEST
        )

    def _score(self, tokens: SequenceTokens, scored: LocalScore) -> TeacherScore:
        assert self._identity is not None
        manifest_id = self._identity.manifest.manifest_id
        if scored.hidden is None:
            return TeacherScore(manifest_id, tokens.completion, scored.topk)
        return HiddenScore(manifest_id, tokens.completion, scored.topk, scored.hidden)
