"""Tests of the self-check before a teacher is ready, with correct and faulty engines."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import Engine, EngineCrashError, EngineDescription, ScoringTask
from mopd_server.scoring.batching import Batcher
from mopd_server.scoring.self_check import TOLERANCES, SelfCheckError, check_engine
from mopd_server.scoring.service import TeacherService
from mopd_server.scoring.tokenizer_loading import ServedTokenizer
from mopd_server.service_error import ServiceError
from mopd_server.settings import TeacherSettings
from tests.server.tiny_teachers import TinyTeacher

#: Changes the scores of a batch.
Fault = Callable[[Sequence[ScoringTask], list[TopKLogprobs]], list[TopKLogprobs]]


class FaultyEngine:
    """A real engine with changed scores."""

    def __init__(self, engine: Engine, fault: Fault, **changes: object) -> None:
        self._engine = engine
        self._fault = fault
        self.description: EngineDescription = replace(engine.description, **changes)
        self.batches: list[list[ScoringTask]] = []

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        self.batches.append(list(batch))
        return self._fault(batch, self._engine.score(batch, top_k=top_k, temperature=temperature))


def no_fault(batch: Sequence[ScoringTask], scores: list[TopKLogprobs]) -> list[TopKLogprobs]:
    return scores


def in_batches(change: Callable[[TopKLogprobs], TopKLogprobs]) -> Fault:
    """Apply a change to the scores of batches of more than one sequence."""
    return lambda batch, scores: scores if len(batch) == 1 else [change(s) for s in scores]


def lowered(nats: float) -> Callable[[TopKLogprobs], TopKLogprobs]:
    return lambda s: TopKLogprobs(
        s.ids, s.logprobs - nats, s.token_logprobs - nats, s.tail_logprobs
    )


def shifted(scores: TopKLogprobs) -> TopKLogprobs:
    """Shift all rows by one."""
    return TopKLogprobs(
        np.roll(scores.ids, 1, axis=0),
        np.roll(scores.logprobs, 1, axis=0),
        np.roll(scores.token_logprobs, 1),
        np.roll(scores.tail_logprobs, 1),
    )


def check(teacher: TinyTeacher, fault: Fault, **changes: object) -> FaultyEngine:
    engine = FaultyEngine(teacher.engine, fault, **changes)
    scorer = Batcher(
        engine,
        max_batch_tokens=1000,
        max_queue_tokens=1000,
        on_crash=lambda cause: None,
        on_cancelled=lambda sequences: None,
    )
    ids = np.array(teacher.real_ids, dtype=np.int32)
    asyncio.run(check_engine(scorer, engine.description, ids, max_top_k=5))
    return engine


def test_rows_that_depend_on_later_tokens_are_rejected(qwen_teacher: TinyTeacher) -> None:
    """As the scores of an encoder: they change with the length of the completion."""

    def fault(batch: Sequence[ScoringTask], scores: list[TopKLogprobs]) -> list[TopKLogprobs]:
        return [
            lowered(0.01 * len(task.completion_ids))(score)
            for task, score in zip(batch, scores, strict=True)
        ]

    with pytest.raises(SelfCheckError) as caught:
        check(qwen_teacher, fault)
    assert caught.value.key == "later tokens"


def test_correct_engine_is_checked_unbatched_batched_and_with_candidates(
    qwen_teacher: TinyTeacher,
) -> None:
    single, batch, start, with_candidates = check(qwen_teacher, no_fault).batches
    (probe,) = single
    assert len(start[0].completion_ids) < len(probe.completion_ids)
    assert len(batch) > 2
    assert batch.index(probe) not in (0, len(batch) - 1)
    assert len({task.tokens for task in batch}) == len(batch)
    assert with_candidates[0].candidate_ids is not None


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items())
def test_differences_up_to_rounding_are_tolerated(
    dtype: str, tolerance: float, qwen_teacher: TinyTeacher
) -> None:
    check(qwen_teacher, in_batches(lowered(0.9 * tolerance)), dtype=dtype)
    with pytest.raises(SelfCheckError) as caught:
        check(qwen_teacher, in_batches(lowered(2 * tolerance)), dtype=dtype)
    assert (caught.value.code, caught.value.key) == ("self_check_failed", "batching")
    assert f"at most {tolerance:g}" in str(caught.value)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda batch, scores: [*scores[1:], scores[0]], id="rows of another sequence"),
        pytest.param(
            in_batches(
                lambda s: TopKLogprobs(s.ids, s.logprobs - 1, s.token_logprobs, s.tail_logprobs)
            ),
            id="wrong distribution, correct token",
        ),
        pytest.param(in_batches(shifted), id="shift by one"),
        pytest.param(
            in_batches(
                lambda s: TopKLogprobs(
                    s.ids[1:], s.logprobs[1:], s.token_logprobs[1:], s.tail_logprobs[1:]
                )
            ),
            id="missing row",
        ),
    ],
)
def test_fault_of_batching_is_detected(fault: Fault, qwen_teacher: TinyTeacher) -> None:
    with pytest.raises(SelfCheckError) as caught:
        check(qwen_teacher, fault)
    assert caught.value.key == "batching"


def test_fault_of_candidates_is_detected(qwen_teacher: TinyTeacher) -> None:
    def fault(batch: Sequence[ScoringTask], scores: list[TopKLogprobs]) -> list[TopKLogprobs]:
        return scores if batch[0].candidate_ids is None else [shifted(score) for score in scores]

    with pytest.raises(SelfCheckError) as caught:
        check(qwen_teacher, fault)
    assert caught.value.key == "candidate_ids"
    check(qwen_teacher, fault, candidate_ids=False)


@pytest.mark.parametrize("longest", [2, 3, 30])
def test_sequences_of_the_check_fit_the_model(longest: int, qwen_teacher: TinyTeacher) -> None:
    engine = check(qwen_teacher, no_fault, max_model_len=longest)
    assert max(task.tokens for batch in engine.batches for task in batch) == min(longest, 30)
    assert all(len(task.completion_ids) for batch in engine.batches for task in batch)


def service_with(teacher: TinyTeacher, fault: Fault) -> TeacherService:
    settings = TeacherSettings(model="tiny", name="faulty")
    return TeacherService(
        ServedTokenizer(teacher.tokenizer, {}), FaultyEngine(teacher.engine, fault), settings
    )


def test_faulty_teacher_never_becomes_ready(qwen_teacher: TinyTeacher) -> None:
    service = service_with(qwen_teacher, in_batches(shifted))
    service.warm_up()
    assert not service.ready
    assert service.failure is not None
    assert "SelfCheckError" in service.failure
    with pytest.raises(ServiceError) as caught:
        service.require_ready()
    assert (caught.value.status, caught.value.code) == (503, "failed")
    assert "SelfCheckError" in str(caught.value)


def test_engine_crash_is_reported_once_to_early_and_late_callbacks(
    qwen_teacher: TinyTeacher, caplog: pytest.LogCaptureFixture
) -> None:
    crashed = False

    def fault(batch: Sequence[ScoringTask], scores: list[TopKLogprobs]) -> list[TopKLogprobs]:
        if crashed:
            raise EngineCrashError("device 'cuda' fails every call")
        return scores

    caplog.set_level(logging.CRITICAL)
    service = service_with(qwen_teacher, fault)
    early: list[str] = []
    late: list[str] = []
    service.on_engine_crash = early.append
    service.warm_up()
    assert (service.ready, early) == (True, [])
    crashed = True
    for _ in range(2):
        service.warm_up()  # scores a sequence
    assert early == ["device 'cuda' fails every call"]
    assert (service.ready, service.failure) == (False, early[0])
    service.on_engine_crash = late.append
    assert late == early[:1]
