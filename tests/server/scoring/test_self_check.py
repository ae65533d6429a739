"""The self-check before a teacher serves, against honest engines and ones that lie."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import Engine, EngineDead, EngineDescription, ScoringTask
from mopd_server.scoring.batching import Batcher
from mopd_server.scoring.self_check import TOLERANCES, SelfCheckError, check_engine
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import TeacherSettings
from tests.server.tiny_teachers import TinyTeacher

#: Changes the answers to a batch.
Lie = Callable[[Sequence[ScoringTask], list[TopKLogprobs]], list[TopKLogprobs]]


class LyingEngine:
    """A real engine whose answers are changed on the way."""

    def __init__(self, honest: Engine, lie: Lie, **changed: object) -> None:
        self._honest = honest
        self._lie = lie
        self.description: EngineDescription = replace(honest.description, **changed)
        self.asked: list[list[ScoringTask]] = []

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        self.asked.append(list(batch))
        return self._lie(batch, self._honest.score(batch, top_k=top_k, temperature=temperature))


def shifted(scores: TopKLogprobs, by: float) -> TopKLogprobs:
    """Every log-probability lower by ``by`` nats."""
    return TopKLogprobs(
        scores.ids, scores.logprobs - by, scores.token_logprobs - by, scores.tail_logprobs
    )


def rolled(scores: TopKLogprobs) -> TopKLogprobs:
    """Every row one too late: the classic."""
    return TopKLogprobs(
        np.roll(scores.ids, 1, axis=0),
        np.roll(scores.logprobs, 1, axis=0),
        np.roll(scores.token_logprobs, 1),
        np.roll(scores.tail_logprobs, 1),
    )


def check(teacher: TinyTeacher, lie: Lie, **changed: object) -> LyingEngine:
    engine = LyingEngine(teacher.engine, lie, **changed)
    scorer = Batcher(
        engine,
        max_batch_tokens=1000,
        max_queue_tokens=1000,
        on_death=lambda cause: None,
        on_cancelled=lambda sequences: None,
    )
    ids = np.array(teacher.real_ids, dtype=np.int32)
    asyncio.run(check_engine(scorer, engine.description, ids, max_top_k=5))
    return engine


def test_an_honest_engine_is_asked_alone_in_company_and_by_candidates(
    qwen_teacher: TinyTeacher,
) -> None:
    engine = check(qwen_teacher, lambda batch, scores: scores)
    alone, batch, by_candidates = engine.asked
    (probe,) = alone
    assert len(batch) > 2
    assert batch.index(probe) not in (0, len(batch) - 1)
    assert len({task.tokens for task in batch}) == len(batch)
    assert by_candidates[0].candidate_ids is not None


def test_rounding_is_forgiven_and_more_is_not(qwen_teacher: TinyTeacher) -> None:
    for dtype, tolerance in TOLERANCES.items():

        def lie(
            batch: Sequence[ScoringTask], scores: list[TopKLogprobs], by: float = 0.9 * tolerance
        ) -> list[TopKLogprobs]:
            return scores if len(batch) == 1 else [shifted(score, by) for score in scores]

        check(qwen_teacher, lie, dtype=dtype)
        with pytest.raises(SelfCheckError, match=f"at most {tolerance:g}, which rounding"):
            check(
                qwen_teacher,
                lambda b, s, by=2 * tolerance: s if len(b) == 1 else [shifted(x, by) for x in s],
                dtype=dtype,
            )


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        ("a neighbour's rows", lambda batch, scores: [*scores[1:], scores[0]]),
        ("another distribution around the right token", lambda batch, scores: [
            TopKLogprobs(s.ids, s.logprobs - 1, s.token_logprobs, s.tail_logprobs) for s in scores
        ]),
        ("rows that are late", lambda batch, scores: [rolled(s) for s in scores]),
        ("fewer rows", lambda batch, scores: [
            TopKLogprobs(s.ids[1:], s.logprobs[1:], s.token_logprobs[1:], s.tail_logprobs[1:])
            for s in scores
        ]),
    ],
)  # fmt: skip
def test_what_goes_wrong_in_batches_is_found(
    name: str, lie: Lie, qwen_teacher: TinyTeacher
) -> None:
    with pytest.raises(SelfCheckError, match="alone and inside a batch"):
        check(qwen_teacher, lambda batch, s: s if len(batch) == 1 else lie(batch, s))


def test_candidates_that_are_scored_otherwise_are_found(qwen_teacher: TinyTeacher) -> None:
    def lie(batch: Sequence[ScoringTask], scores: list[TopKLogprobs]) -> list[TopKLogprobs]:
        return scores if batch[0].candidate_ids is None else [rolled(score) for score in scores]

    with pytest.raises(SelfCheckError, match="by top_k and by candidate_ids"):
        check(qwen_teacher, lie)
    check(qwen_teacher, lie, candidate_ids=False)  # then nobody asks


@pytest.mark.parametrize("longest", [2, 3, 30])
def test_the_known_sequences_fit_the_model(longest: int, qwen_teacher: TinyTeacher) -> None:
    engine = check(qwen_teacher, lambda batch, scores: scores, max_model_len=longest)
    assert max(task.tokens for batch in engine.asked for task in batch) == min(longest, 30)
    assert all(len(task.completion_ids) for batch in engine.asked for task in batch)


def service(teacher: TinyTeacher, lie: Lie) -> TeacherService:
    return TeacherService(
        teacher.tokenizer,
        LyingEngine(teacher.engine, lie),
        TeacherSettings(model="tiny", name="liar"),
    )


def test_a_liar_never_becomes_ready(
    qwen_teacher: TinyTeacher, caplog: pytest.LogCaptureFixture
) -> None:
    liar = service(qwen_teacher, lambda batch, s: s if len(batch) == 1 else [rolled(x) for x in s])
    liar.warm_up()
    assert not liar.ready
    assert liar.failure is not None
    assert "its warm-up failed with SelfCheckError: the engine scored one sequence" in liar.failure
    with pytest.raises(Exception, match="'liar' cannot score: its warm-up failed"):
        liar.require_ready()


def test_a_death_is_told_once_to_whoever_asks_to_know(
    qwen_teacher: TinyTeacher, caplog: pytest.LogCaptureFixture
) -> None:
    dead = False

    def lie(batch: Sequence[ScoringTask], scores: list[TopKLogprobs]) -> list[TopKLogprobs]:
        if dead:
            raise EngineDead("device 'cuda' fails every call")
        return scores

    caplog.set_level(logging.CRITICAL)
    teacher = service(qwen_teacher, lie)
    early: list[str] = []
    late: list[str] = []
    teacher.on_engine_death = early.append
    teacher.warm_up()
    assert (teacher.ready, early) == (True, [])
    dead = True
    for _ in range(2):
        teacher.warm_up()  # the shortest way to make it score
    assert early == ["device 'cuda' fails every call"]
    assert (teacher.ready, teacher.failure) == (False, early[0])
    teacher.on_engine_death = late.append
    assert late == early[:1]
