"""``TeacherService``: a teacher without HTTP, from a request to a response.

check limits -> tokenize -> queue and score -> answer. This is the file to read first.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import numpy as np

from mopd_protocol.manifest import Features, Manifest
from mopd_protocol.requests import ControlToken, LogprobsRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore
from mopd_server.engines.base import AsyncEngine, Engine, EngineTimes, ScoringTask
from mopd_server.scoring.batching import Batcher
from mopd_server.scoring.direct_scoring import DirectScorer
from mopd_server.scoring.metrics import ServiceMetrics
from mopd_server.scoring.scorer import SequenceScorer
from mopd_server.scoring.self_check import check_engine
from mopd_server.scoring.tokenization import RequestTokenizer, TokenizedSequence
from mopd_server.service_error import ServiceError
from mopd_server.settings import TeacherSettings

logger = logging.getLogger(__name__)

#: Outside this range float32 softmax is one-hot or uniform, or not a number at all.
TEMPERATURE_RANGE = (0.01, 100.0)

#: Characters of one request beyond which it is tokenized when no other such request is: a body of
#: 15 MiB takes 2.5 GB on the way to its refusal.
LARGE_TEXT = 2**20


class TeacherService:
    """One teacher: its tokenizer, its engine, the queue between them, and its identity card."""

    def __init__(
        self,
        tokenizer: RequestTokenizer,
        engine: Engine | AsyncEngine,
        settings: TeacherSettings,
    ) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self.manifest = _manifest(tokenizer, engine, settings)
        self.metrics = ServiceMetrics(
            waiting_sequences=lambda: self._scorer.waiting_sequences,
            waiting_tokens=lambda: self._scorer.waiting_tokens,
        )
        self.failure: str | None = None
        """Why this teacher will never score (again): its warm-up failed, or its engine died."""
        self._warm = False
        self._cause_of_death: str | None = None
        self._on_engine_death: Callable[[str], None] | None = None
        self._dying = threading.Lock()
        self._scorer = self._scorer_of(engine, settings)
        # One thread, which is busy for as long as it works also when the client has left.
        self._large_texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-texts")

    @property
    def ready(self) -> bool:
        """Whether the warm-up has passed and the engine lives."""
        return self._warm and self.failure is None

    @property
    def on_engine_death(self) -> Callable[[str], None] | None:
        """Called once, from any thread, with one sentence, when the engine has died.

        Set after that, it is called at once.
        """
        return self._on_engine_death

    @on_engine_death.setter
    def on_engine_death(self, hook: Callable[[str], None] | None) -> None:
        with self._dying:
            self._on_engine_death = hook
            cause = self._cause_of_death
        if hook is not None and cause is not None:
            hook(cause)

    @property
    def tokenizer_files(self) -> Mapping[str, str]:
        """File name -> text, for ``AutoTokenizer.from_pretrained`` on the student's side."""
        return self._tokenizer.files

    def warm_up(self) -> None:
        """Scores a few tokens, which compiles and allocates what is lazy, and checks the answers.

        Blocks; a failure is kept in ``failure`` and logged, because a service that cannot score
        should say so on ``/readyz``, not vanish.
        """
        started = time.monotonic()
        ids = np.flatnonzero(self._tokenizer.table.present).astype(np.int32)
        check = check_engine(
            self._scorer, self._engine.description, ids, max_top_k=self.manifest.max_top_k
        )
        try:
            asyncio.run(check)
        except Exception as error:
            self.failure = self.failure or f"its warm-up failed with {_told(error)}"
            logger.exception("teacher %r failed its warm-up", self.manifest.service)
            return
        self._warm = True
        seconds = time.monotonic() - started
        logger.info("teacher %r is ready, warmed up in %.1f s", self.manifest.service, seconds)

    def require_ready(self) -> None:
        """Raises ServiceError 503 until a warm-up has passed, and after the engine has died."""
        if self.ready:
            return
        name = self.manifest.service
        if self.failure:
            raise ServiceError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"teacher {name!r} cannot score: {self.failure}; restart it",
            )
        raise ServiceError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"teacher {name!r} is still warming up; ask again later",
            retry_after_seconds=1,
        )

    async def score(
        self, request: LogprobsRequest, *, admit: Callable[[int, int], None] | None = None
    ) -> LogprobsResponse:
        """The teacher's view of every completion of ``request``.

        ``admit`` is told the tokens of prompts and completions before they are queued, and may
        refuse them.

        Raises:
            ServiceError: when any sequence cannot be scored; nothing is scored in part.
        """
        self.require_ready()
        self._require_within_limits(request)
        started = time.monotonic()
        threads = self._large_texts if _characters(request) > LARGE_TEXT else None
        loop = asyncio.get_running_loop()
        sequences = await loop.run_in_executor(threads, self._tokenize, request)
        tokenize_seconds = time.monotonic() - started
        if admit is not None:
            admit(
                sum(len(sequence.prompt_ids) for sequence in sequences),
                sum(len(sequence.completion) for sequence in sequences),
            )
        scored = await self._scorer.score(
            [sequence.task for sequence in sequences],
            top_k=request.top_k,
            temperature=request.temperature,
        )
        timings = _timings(tokenize_seconds, [times for _, times in scored])
        self._count(sequences, timings)
        return LogprobsResponse(
            manifest_id=self.manifest.manifest_id,
            ids=tuple(sequence.id for sequence in request.sequences),
            scores=tuple(
                TeacherScore(self.manifest.manifest_id, sequence.completion, topk)
                for sequence, (topk, _) in zip(sequences, scored, strict=True)
            ),
            timings=timings,
        )

    def close(self) -> None:
        """Ends the engine."""
        self._large_texts.shutdown(wait=False, cancel_futures=True)
        self._scorer.close()

    def _scorer_of(self, engine: Engine | AsyncEngine, settings: TeacherSettings) -> SequenceScorer:
        if isinstance(engine, AsyncEngine):
            return DirectScorer(
                engine,
                max_queue_tokens=settings.max_queue_tokens,
                on_death=self._engine_died,
                on_cancelled=self.metrics.cancelled_sequences.inc,
            )
        return Batcher(
            engine,
            max_batch_tokens=settings.max_batch_tokens,
            max_queue_tokens=settings.max_queue_tokens,
            on_death=self._engine_died,
            on_cancelled=self.metrics.cancelled_sequences.inc,
        )

    def _engine_died(self, cause: str) -> None:
        with self._dying:
            if self._cause_of_death is not None:
                return
            self._cause_of_death = self.failure = cause
            hook = self._on_engine_death
        logger.error("teacher %r cannot go on: %s", self.manifest.service, cause)
        if hook is not None:
            hook(cause)

    def _require_within_limits(self, request: LogprobsRequest) -> None:
        limit = self.manifest.max_top_k
        if request.top_k > limit:
            raise ServiceError(
                HTTPStatus.BAD_REQUEST,
                f"top_k: found {request.top_k}, expected at most {limit} (max_top_k in the "
                "manifest of this teacher)",
            )
        features = self.manifest.features
        lowest, highest = TEMPERATURE_RANGE if features.temperature else (1.0, 1.0)
        if not lowest <= request.temperature <= highest:
            expected = (
                f"{lowest:g} to {highest:g}"
                if features.temperature
                else "1, the only one at which this teacher's engine scores"
            )
            raise ServiceError(
                HTTPStatus.BAD_REQUEST,
                f"temperature: found {request.temperature}, expected {expected}",
            )
        for index, sequence in enumerate(request.sequences):
            widest = max(map(len, sequence.candidate_ids or ()), default=0)
            if sequence.candidate_ids is not None and not features.candidate_ids:
                raise ServiceError(
                    HTTPStatus.BAD_REQUEST,
                    f"sequences[{index}].candidate_ids: this teacher's engine scores only its own "
                    "top_k (features in the manifest)",
                )
            if widest > limit:
                raise ServiceError(
                    HTTPStatus.BAD_REQUEST,
                    f"sequences[{index}].candidate_ids: found {widest} ids for one token, "
                    f"expected at most {limit} (max_top_k in the manifest of this teacher)",
                )

    def _tokenize(self, request: LogprobsRequest) -> list[TokenizedSequence]:
        tokenized: list[TokenizedSequence] = []
        for index, sequence in enumerate(request.sequences):
            try:
                tokenized.append(self._tokenizer.tokenize(sequence))
                self._require_short_enough(tokenized[-1].task)
            except ServiceError as refusal:
                raise refusal.about(f"sequences[{index}]") from refusal
        return tokenized

    def _require_short_enough(self, task: ScoringTask) -> None:
        limit = self.manifest.max_model_len
        if task.tokens > limit:
            raise ServiceError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"found {task.tokens} tokens ({len(task.prompt_ids)} of prompt and "
                f"{len(task.completion_ids)} of completion), expected at most {limit} "
                "(max_model_len in the manifest of this teacher)",
            )

    def _count(self, sequences: list[TokenizedSequence], timings: Mapping[str, float]) -> None:
        self.metrics.tokens_scored.inc(sum(len(sequence.completion) for sequence in sequences))
        self.metrics.prompt_tokens.inc(sum(len(sequence.prompt_ids) for sequence in sequences))
        for phase, seconds in timings.items():
            self.metrics.phase_seconds.labels(phase).observe(seconds)


def _characters(request: LogprobsRequest) -> int:
    """Of all that is to be tokenized."""
    texts: list[str] = []
    for sequence in request.sequences:
        completion = sequence.completion or ""
        texts += [completion] if isinstance(completion, str) else _texts(completion)
        texts += [message.content for message in sequence.messages or ()]
        texts.append(sequence.prompt or "")
    return sum(map(len, texts))


def _texts(parts: Sequence[str | ControlToken]) -> list[str]:
    return [part for part in parts if isinstance(part, str)]


def _timings(tokenize_seconds: float, times: list[EngineTimes]) -> dict[str, float]:
    """Seconds by phase; of a request in several batches, the longest wait and the slowest batch."""
    return {
        "tokenize": tokenize_seconds,
        "queue": max(time.queue_seconds for time in times),
        "prefill": max(time.prefill_seconds for time in times),
    }


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ServiceError) else f"{type(error).__name__}: {error}"


def _manifest(
    tokenizer: RequestTokenizer, engine: Engine | AsyncEngine, settings: TeacherSettings
) -> Manifest:
    about, table = engine.description, tokenizer.table
    return Manifest(
        service=settings.service_name,
        model=about.model,
        revision=about.revision,
        engine=about.engine,
        engine_version=about.engine_version,
        dtype=about.dtype,
        logit_width=about.logit_width,
        tokenizer_fingerprint=table.fingerprint,
        tokenizer_size=table.size,
        roles=table.roles,
        chat_template_hash=tokenizer.template_hash,
        max_model_len=about.max_model_len,
        max_top_k=min(settings.top_k_max, int(table.present.sum())),
        features=Features(
            candidate_ids=about.candidate_ids,
            temperature=about.temperature,
            messages=tokenizer.renders_messages,
        ),
    )
