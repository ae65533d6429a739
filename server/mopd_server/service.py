"""``TeacherService``: a teacher without HTTP, from a request to a response.

check limits -> tokenize -> queue and score -> answer. This is the file to read first.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from http import HTTPStatus

import numpy as np

from mopd_protocol.manifest import Features, Manifest
from mopd_protocol.requests import LogprobsRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore
from mopd_server.batching import Batcher, EngineTimes
from mopd_server.engine import Engine, ScoringTask
from mopd_server.metrics import ServiceMetrics
from mopd_server.refusal import Refusal
from mopd_server.settings import TeacherSettings
from mopd_server.tokenization import TeacherTokenizer, TokenizedSequence

logger = logging.getLogger(__name__)

#: Outside this range float32 softmax is one-hot or uniform, or not a number at all.
TEMPERATURE_RANGE = (0.01, 100.0)


class TeacherService:
    """One teacher: its tokenizer, its engine, the queue between them, and its identity card."""

    def __init__(
        self, tokenizer: TeacherTokenizer, engine: Engine, settings: TeacherSettings
    ) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self._batcher = Batcher(
            engine,
            max_batch_tokens=settings.max_batch_tokens,
            max_queue_tokens=settings.max_queue_tokens,
        )
        self.manifest = _manifest(tokenizer, engine, settings)
        self.metrics = ServiceMetrics(
            waiting_sequences=lambda: self._batcher.waiting_sequences,
            waiting_tokens=lambda: self._batcher.waiting_tokens,
        )
        self.ready = False
        """Whether a warm-up scoring has passed."""
        self.failure: str | None = None
        """Why the warm-up failed; this teacher will never be ready then."""

    @property
    def tokenizer_files(self) -> Mapping[str, str]:
        """File name -> text, for ``AutoTokenizer.from_pretrained`` on the student's side."""
        return self._tokenizer.files

    def warm_up(self) -> None:
        """Scores a few tokens, which compiles and allocates what is lazy, and proves that it works.

        Blocks; a failure is kept in ``failure`` and logged, because a service that cannot score
        should say so on ``/readyz``, not vanish.
        """
        started = time.monotonic()
        ids = np.resize(np.flatnonzero(self._tokenizer.table.present), 4).astype(np.int32)
        try:
            self._engine.score([ScoringTask(ids[:2], ids[2:])], top_k=1, temperature=1.0)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            logger.exception("teacher %r failed its warm-up", self.manifest.service)
            return
        self.ready = True
        seconds = time.monotonic() - started
        logger.info("teacher %r is ready, warmed up in %.1f s", self.manifest.service, seconds)

    def require_ready(self) -> None:
        """Raises Refusal 503 until a warm-up has passed."""
        if self.ready:
            return
        name = self.manifest.service
        if self.failure:
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"teacher {name!r} failed its warm-up with {self.failure}; restart it",
            )
        raise Refusal(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"teacher {name!r} is still warming up; ask again later",
            retry_after_seconds=1,
        )

    async def score(self, request: LogprobsRequest) -> LogprobsResponse:
        """The teacher's view of every completion of ``request``.

        Raises:
            Refusal: when any sequence cannot be scored; nothing is scored in part.
        """
        self.require_ready()
        self._require_within_limits(request)
        started = time.monotonic()
        sequences = await asyncio.to_thread(self._tokenize, request)
        tokenize_seconds = time.monotonic() - started
        scored = await self._batcher.score(
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
        """Ends the engine's thread."""
        self._batcher.close()

    def _require_within_limits(self, request: LogprobsRequest) -> None:
        limit = self.manifest.max_top_k
        if request.top_k > limit:
            raise Refusal(
                HTTPStatus.BAD_REQUEST,
                f"top_k: found {request.top_k}, expected at most {limit} (max_top_k in the "
                "manifest of this teacher)",
            )
        features = self.manifest.features
        lowest, highest = TEMPERATURE_RANGE if features.temperature else (1.0, 1.0)
        if not lowest <= request.temperature <= highest:
            raise Refusal(
                HTTPStatus.BAD_REQUEST,
                f"temperature: found {request.temperature}, expected {lowest} to {highest}",
            )
        for index, sequence in enumerate(request.sequences):
            widest = max(map(len, sequence.candidate_ids or ()), default=0)
            if sequence.candidate_ids is not None and not features.candidate_ids:
                raise Refusal(
                    HTTPStatus.BAD_REQUEST,
                    f"sequences[{index}].candidate_ids: this teacher's engine scores only its own "
                    "top_k (features in the manifest)",
                )
            if widest > limit:
                raise Refusal(
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
            except Refusal as refusal:
                raise refusal.about(f"sequences[{index}]") from refusal
        return tokenized

    def _require_short_enough(self, task: ScoringTask) -> None:
        limit = self.manifest.max_model_len
        if task.tokens > limit:
            raise Refusal(
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


def _timings(tokenize_seconds: float, times: list[EngineTimes]) -> dict[str, float]:
    """Seconds by phase; of a request in several batches, the longest wait and the slowest batch."""
    return {
        "tokenize": tokenize_seconds,
        "queue": max(time.queue_seconds for time in times),
        "prefill": max(time.prefill_seconds for time in times),
    }


def _manifest(tokenizer: TeacherTokenizer, engine: Engine, settings: TeacherSettings) -> Manifest:
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
