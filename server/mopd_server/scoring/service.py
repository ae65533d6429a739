"""``TeacherService``: a teacher without HTTP, from a request to a response.

Validate limits -> tokenize -> queue and score -> respond. The first file to read.
"""

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mopd_protocol.errors import TeacherError
from mopd_protocol.manifest import Manifest, TranslationFacts
from mopd_protocol.request_tokenizer import RequestTokenizer, TokenizedSequence
from mopd_protocol.requests import LogprobsRequest, SequenceRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import AsyncEngine, Engine, ScoringTask
from mopd_server.engines.registry import load_engine
from mopd_server.scoring.batching import Batcher, Lease
from mopd_server.scoring.direct_scoring import DirectScorer
from mopd_server.scoring.manifests import manifests_of
from mopd_server.scoring.metrics import ServiceMetrics
from mopd_server.scoring.request_limits import LARGE_TEXT, require_within_limits, text_size
from mopd_server.scoring.scorer import Scorer
from mopd_server.scoring.self_check import check_engine
from mopd_server.scoring.translation import Translation
from mopd_server.service_error import ServiceError
from mopd_server.settings import TeacherSettings

if TYPE_CHECKING:
    from mopd_server.scoring.tokenizer_loading import ServedTokenizer

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Forward passes of work that an asynchronous engine gets: more would not be in fair order, less
#: would leave it idle.
STEPS_AHEAD = 4

#: Silence of the engine after which no more requests are accepted, until it responds.
STALL_SECONDS = 10.0


class TeacherService:
    """One teacher: tokenizer, engine, the queue between the two, and the manifest.

    ``lease`` surrounds each batch of a blocking engine. ``heartbeat`` returns the seconds for which
    its processes have not responded; without, the duration of a batch shows that it hangs.
    """

    def __init__(
        self,
        tokenizer: "ServedTokenizer",
        engine: Engine | AsyncEngine,
        settings: TeacherSettings,
        *,
        lease: Lease | None = None,
        heartbeat: Callable[[], float] | None = None,
    ) -> None:
        self.tokenizer_files = tokenizer.files
        """File name -> text, for ``AutoTokenizer.from_pretrained`` on the student's side."""
        self.tokenizer: RequestTokenizer = tokenizer.requests
        self._engine = engine
        self.manifests = manifests_of(self.tokenizer, engine.description, settings)
        """Name of an adapter, None for the base model -> manifest."""
        self.translation: Translation | None = None
        """Scores in the ids of a student, if there is one; set by ``translate``."""
        self.metrics = ServiceMetrics(
            queued_sequences=lambda: self._scorer.queued_sequences,
            queued_tokens=lambda: self._scorer.queued_tokens,
            tokens_by_key=lambda: self._scorer.queued_tokens_by_key,
        )
        self.failure: str | None = None
        """Cause of a permanent failure: of the warm-up, or of the engine."""
        self.warm = False
        """True after a successful warm-up."""
        self._was_stalled = False  # as logged
        self._crash_cause: str | None = None
        self._on_engine_crash: Callable[[str], None] | None = None
        self._crash_lock = threading.Lock()
        self._scorer = self._create_scorer(engine, settings, lease, heartbeat)
        # One thread: bounds the memory, and the threads that compete with the event loop. Its work
        # continues after the client has disconnected.
        self._large_work = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-work")

    @classmethod
    def load(cls, settings: TeacherSettings) -> "TeacherService":
        """Load the tokenizer and the model; the service is not warmed up.

        The tokenizer is loaded and validated first: it takes a moment, the model may take minutes.

        Raises:
            ConfigError: if the model, its tokenizer or a setting is invalid.
            DataError: if the tokenizer is unsupported, or wider than the head of the model.
        """
        # transformers and torch: probes get responses during the import
        from mopd_server.scoring.tokenizer_loading import ServedTokenizer

        tokenizer = ServedTokenizer.read(settings)
        return cls(tokenizer, load_engine(settings, tokenizer.requests.table), settings)

    @property
    def manifest(self) -> Manifest:
        """Manifest of the base model."""
        return self.manifests[None]

    def translate(self, translation: Translation, facts: TranslationFacts) -> None:
        """Also return scores in the ids of a student; the manifests get ``facts``."""
        self.translation = translation
        self.manifests = {
            name: each.model_copy(update={"translation": facts})
            for name, each in self.manifests.items()
        }

    @property
    def ready(self) -> bool:
        """True after a successful warm-up, unless the engine hangs or has crashed."""
        return self.warm and self.failure is None and not self.stalled

    @property
    def stalled(self) -> bool:
        """True while the engine hangs: it has not responded for ``STALL_SECONDS``."""
        stalled = self.silent_seconds > STALL_SECONDS
        if stalled != self._was_stalled:
            self._was_stalled = stalled
            state = "does not respond" if stalled else "responds again"
            logger.warning("teacher %r: the engine %s", self.manifest.service, state)
        return stalled

    @property
    def silent_seconds(self) -> float:
        """Seconds for which the engine should have responded, and has not."""
        return self._scorer.silent_seconds

    @property
    def queued_tokens(self) -> int:
        """Tokens in the queue."""
        return self._scorer.queued_tokens

    @property
    def on_engine_crash(self) -> Callable[[str], None] | None:
        """Callback with the cause, called once from any thread when the engine has crashed.

        If the engine has crashed already, setting the callback calls it immediately.
        """
        return self._on_engine_crash

    @on_engine_crash.setter
    def on_engine_crash(self, callback: Callable[[str], None] | None) -> None:
        with self._crash_lock:
            self._on_engine_crash = callback
            cause = self._crash_cause
        if callback is not None and cause is not None:
            callback(cause)

    def warm_up(self) -> None:
        """Run the self-check, which also compiles and allocates lazily created objects.

        Blocks. A failure is logged and stored in ``failure``: ``/readyz`` reports it while the
        process keeps running.
        """
        started = time.monotonic()
        ids = np.flatnonzero(self.tokenizer.table.present).astype(np.int32)
        check = check_engine(
            self._scorer, self._engine.description, ids, max_top_k=self.manifest.max_top_k
        )
        try:
            asyncio.run(check)
        except Exception as error:
            message = error if isinstance(error, ServiceError) else _with_class(error)
            self.failure = self.failure or f"its warm-up failed with {message}"
            logger.exception("teacher %r: warm-up failed", self.manifest.service)
            return
        self.warm = True
        seconds = time.monotonic() - started
        logger.info("teacher %r is ready, warmed up in %.1f s", self.manifest.service, seconds)

    def require_ready(self) -> None:
        """Raise ServiceError 503 before a successful warm-up, and if the engine has crashed."""
        if self.ready:
            return
        name = self.manifest.service
        if self.failure:
            raise ServiceError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"teacher {name!r} cannot score: {self.failure}. Restart it.",
                code="failed",
            )
        if self.warm:
            raise ServiceError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the engine of teacher {name!r} does not respond. Retry later, or restart it.",
                code="stalled",
                retry_after_seconds=2,
            )
        raise ServiceError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"teacher {name!r} is warming up. Retry later.",
            code="warming_up",
            retry_after_seconds=1,
        )

    async def score(
        self,
        request: LogprobsRequest,
        *,
        adapter: str | None = None,
        admit: Callable[[int, int], None] | None = None,
        key: str = "",
    ) -> LogprobsResponse:
        """Score every completion of ``request``, for the API key of this name.

        ``adapter`` is a name of ``manifests``. ``admit`` is called with the number of prompt and
        completion tokens before the sequences are queued, and may raise ServiceError.

        Raises:
            ServiceError: if any sequence cannot be scored; there are no partial results.
        """
        self.require_ready()
        require_within_limits(request, self.manifest)
        started = time.monotonic()
        large = text_size(request) > LARGE_TEXT
        sequences = await self.run_in_thread(lambda: self._tokenize(request), large=large)
        tokenize_seconds = time.monotonic() - started
        results, timings = await self.score_tasks(
            [_task(sequence, adapter) for sequence in sequences],
            top_k=request.top_k,
            temperature=request.temperature,
            admit=admit,
            key=key,
        )
        timings = {"tokenize": tokenize_seconds, **timings}
        self.metrics.phase_seconds.labels("tokenize").observe(tokenize_seconds)
        manifest_id = self.manifests[adapter].manifest_id
        return LogprobsResponse(
            manifest_id=manifest_id,
            ids=tuple(sequence.id for sequence in request.sequences),
            scores=tuple(
                TeacherScore(manifest_id, sequence.completion, topk)
                for sequence, topk in zip(sequences, results, strict=True)
            ),
            timings=timings,
        )

    async def score_tasks(
        self,
        tasks: Sequence[ScoringTask],
        *,
        top_k: int,
        temperature: float,
        admit: Callable[[int, int], None] | None = None,
        key: str = "",
    ) -> tuple[list[TopKLogprobs], dict[str, float]]:
        """Score valid tasks; return their distributions and the seconds by phase.

        See ``score``. Ids are below ``logit_width``; those without a token have no probability.
        """
        self.require_ready()
        prompt_tokens = sum(len(task.prompt_ids) for task in tasks)
        completion_tokens = sum(len(task.completion_ids) for task in tasks)
        if admit is not None:
            admit(prompt_tokens, completion_tokens)
        results = await self._scorer.score(tasks, top_k=top_k, temperature=temperature, key=key)
        times = [each for _, each in results]
        # The longest wait and the slowest batch, if there were several.
        timings = {
            "queue": max(time.queue_seconds for time in times),
            "prefill": max(time.prefill_seconds for time in times),
        }
        self.metrics.tokens_scored.inc(completion_tokens)
        self.metrics.prompt_tokens.inc(prompt_tokens)
        for phase, seconds in timings.items():
            self.metrics.phase_seconds.labels(phase).observe(seconds)
        return [topk for topk, _ in results], timings

    def tokenize(self, sequence: SequenceRequest) -> TokenizedSequence:
        """Return the tokens of a sequence; blocks."""
        return self.tokenizer.tokenize(sequence, max_tokens=self.manifest.max_model_len)

    async def run_in_thread(self, work: Callable[[], Result], *, large: bool) -> Result:
        """Run ``work`` off the event loop, in the caller's context; ``large`` work one at a time.

        The context has the record of the request, which receives its hash and labels its logs.
        """
        threads, context = self._large_work if large else None, contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(threads, context.run, work)

    def close(self) -> None:
        """Shut down the engine."""
        self._large_work.shutdown(wait=False, cancel_futures=True)
        self._scorer.close()

    def _create_scorer(
        self,
        engine: Engine | AsyncEngine,
        settings: TeacherSettings,
        lease: Lease | None,
        heartbeat: Callable[[], float] | None,
    ) -> Scorer[Any]:
        if isinstance(engine, AsyncEngine):
            return DirectScorer(
                engine,
                engine_tokens=STEPS_AHEAD * settings.max_batch_tokens,
                max_queue_tokens=settings.max_queue_tokens,
                on_crash=self.report_crash,
                on_cancelled=self.metrics.cancelled_sequences.inc,
                weights=dict(settings.key_weights),
            )
        return Batcher(
            engine,
            max_batch_tokens=settings.max_batch_tokens,
            max_queue_tokens=settings.max_queue_tokens,
            on_crash=self.report_crash,
            on_cancelled=self.metrics.cancelled_sequences.inc,
            weights=dict(settings.key_weights),
            lease=lease,
            heartbeat=heartbeat,
        )

    def report_crash(self, cause: str) -> None:
        """Reject all later requests, and call ``on_engine_crash``; only the first cause counts."""
        with self._crash_lock:
            if self._crash_cause is not None:
                return
            self._crash_cause = self.failure = cause
            callback = self._on_engine_crash
        logger.error("teacher %r failed permanently: %s", self.manifest.service, cause)
        if callback is not None:
            callback(cause)

    def _tokenize(self, request: LogprobsRequest) -> list[TokenizedSequence]:
        tokenized: list[TokenizedSequence] = []
        previous: SequenceRequest | None = None
        for index, sequence in enumerate(request.sequences):
            # Completions of one prompt are adjacent.
            shared = previous is not None and _prompt(previous) == _prompt(sequence)
            prompt_ids = tokenized[-1].prompt_ids if shared else None
            previous = sequence
            try:
                longest = self.manifest.max_model_len
                tokens = self.tokenizer.tokenize(
                    sequence, prompt_ids=prompt_ids, max_tokens=longest
                )
                tokens.require_length(longest)
                tokenized.append(tokens)
            except TeacherError as error:
                status, field = error.status or HTTPStatus.BAD_REQUEST, f"sequences[{index}]"
                message, key = f"{field}: {error}", f"{field}.{error.key}"
                raise ServiceError(status, message, key=key) from error
        return tokenized


def _prompt(sequence: SequenceRequest) -> tuple[object, ...]:
    return (
        sequence.messages,
        sequence.chat_template_kwargs,
        sequence.shown_tools,
        sequence.prompt,
        sequence.prompt_token_ids,
    )


def _task(sequence: TokenizedSequence, adapter: str | None) -> ScoringTask:
    return ScoringTask(
        sequence.prompt_ids, sequence.completion.token_ids, sequence.candidate_ids, adapter
    )


def _with_class(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
