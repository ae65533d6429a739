"""Teachers score the first completions while the student is still generating the last."""

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.collection import collect
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.metrics.step_metrics import rollout_metrics
from mopd_trainer.rollouts.source import CompletionBatch
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.scoring import RolloutScorer
from tests.server.tiny_teachers import teacher_of
from tests.trainer.in_process import Recorded, scorer_of, teacher_config
from tests.trainer.students import MESSAGES, model_of, student_of, tokenizer

pytestmark = pytest.mark.anyio

PROMPTS = [Prompt(index=index, messages=MESSAGES, teachers={"math": 1.0}) for index in range(6)]


def settings(**changes: object) -> RolloutConfig:
    return RolloutConfig.model_validate(
        {"max_new_tokens": 4, "generation_batch_size": 2, **changes}
    )


class WaitsForATeacher(Sampler):
    """Generate the last batch only after a teacher has received a request for another."""

    def __init__(self, student: Student, config: RolloutConfig, requested: threading.Event) -> None:
        super().__init__(student, config, seed=0)
        self._requested = requested

    def sample_batch(self, prompts: Sequence[Prompt], *, step: int, batch: int) -> list[Rollout]:
        """Like ``Sampler``; fails after five minutes without a request to the teachers."""
        if batch == 2:
            assert self._requested.wait(300), "no teacher received a request before the last batch"
        return super().sample_batch(prompts, step=step, batch=batch)


@asynccontextmanager
async def scorer_for(student: Student, transport: Recorded) -> AsyncIterator[RolloutScorer]:
    """One teacher, which reads ids, so that none of what a fresh student babbles is dropped."""
    config = teacher_config(loss={"type": "topk_kl"})
    async with scorer_of(student.identity, {"math": (transport, config)}) as scorer:
        yield scorer


def a_teacher() -> Recorded:
    return Recorded(teacher_of(model_of("qwen", seed=1), tokenizer("digit")).app)


async def test_scoring_begins_before_the_last_batch_is_written() -> None:
    requested = threading.Event()
    transport = a_teacher()
    transport.on_scoring = requested.set
    student = student_of()
    async with scorer_for(student, transport) as scorer:
        sampler = WaitsForATeacher(student, settings(), requested)
        examples, _ = await collect(PROMPTS, sampler, scorer, 0)
    assert [example.rollout.prompt.index for example in examples] == [0, 1, 2, 3, 4, 5]
    assert [len(body["sequences"]) for body in transport.requests] == [2, 2, 2]


async def test_samples_per_prompt_are_drawn_and_differ() -> None:
    student = student_of()
    sampler = Sampler(student, settings(samples_per_prompt=3), seed=0, version=5)
    async with scorer_for(student, a_teacher()) as scorer:
        examples, _ = await collect(PROMPTS[:2], sampler, scorer, 5)
    assert [example.rollout.prompt.index for example in examples] == [0, 0, 0, 1, 1, 1]
    assert len({tuple(e.rollout.completion.token_ids.tolist()) for e in examples}) == 6
    assert {example.rollout.policy_version for example in examples} == {5}


async def test_a_prompt_without_room_for_a_completion_is_dropped_and_counted() -> None:
    student = student_of()
    assert student.max_length == 256
    long = Prompt(
        index=9,
        messages=(MESSAGES[0].model_copy(update={"content": "x9" * 150}),),
        teachers={"math": 1.0},
    )
    async with scorer_for(student, a_teacher()) as scorer:
        sampler = Sampler(student, settings(), seed=0)
        examples, metrics = await collect([PROMPTS[0], long], sampler, scorer, 0)
        assert [example.rollout.prompt.index for example in examples] == [0]
        assert metrics["dropped/prompt_too_long"] == 1
        assert metrics["dropped/total"] == 1
        _, after = await collect([PROMPTS[0]], sampler, scorer, 1)
        assert "dropped/prompt_too_long" not in after
        assert await collect([long], sampler, scorer, 2) == (
            [],
            {"dropped/prompt_too_long": 1.0, "dropped/total": 1.0},
        )


async def test_after_rollout_scoring_begins_after_the_last_completion() -> None:
    requested = threading.Event()
    transport = a_teacher()
    transport.on_scoring = requested.set
    seen: list[bool] = []

    class Watches(Sampler):
        def sample_batch(
            self, prompts: Sequence[Prompt], *, step: int, batch: int
        ) -> list[Rollout]:
            seen.append(requested.is_set())
            return super().sample_batch(prompts, step=step, batch=batch)

    student = student_of()
    async with scorer_for(student, transport) as scorer:
        sampler = Watches(student, settings(), seed=0)
        later, _ = await collect(PROMPTS, sampler, scorer, 0, scoring="after_rollout")
        assert seen == [False] * 3
        assert requested.is_set()
        at_once, _ = await collect(PROMPTS, Sampler(student, settings(), seed=0), scorer, 0)
    for item, other in zip(later, at_once, strict=True):
        assert item.rollout.completion.token_ids.tolist() == (
            other.rollout.completion.token_ids.tolist()
        )


async def test_examples_are_in_the_order_of_the_prompts_not_of_completion() -> None:
    class Backwards(Sampler):
        async def sample(
            self, prompts: Sequence[Prompt], *, step: int
        ) -> AsyncGenerator[CompletionBatch]:
            actual = [each async for each in super().sample(prompts, step=step)]
            for each in reversed(actual):
                yield each

    student = student_of()
    async with scorer_for(student, a_teacher()) as scorer:
        examples, _ = await collect(PROMPTS, Backwards(student, settings(), seed=0), scorer, 0)
    assert [example.rollout.prompt.index for example in examples] == list(range(6))


async def test_truncated_completions_are_dropped_before_scoring() -> None:
    student = student_of()
    long = settings(max_new_tokens=200)
    transport = a_teacher()
    async with scorer_for(student, transport) as scorer:
        examples, _ = await collect(PROMPTS, Sampler(student, long, seed=0), scorer, 0)
        ends = sorted(len(example.rollout.completion) for example in examples)
        some = settings(max_new_tokens=ends[2])  # at least one ends in time, and one does not
        sampled, _ = await collect(PROMPTS, Sampler(student, some, seed=0), scorer, 0)
        finished = [e for e in sampled if e.rollout.finish_reason == "stop"]
        assert 0 < len(finished) < len(sampled)
        transport.requests.clear()
        sampler = Sampler(student, some, seed=0)
        kept, dropped = await collect(PROMPTS, sampler, scorer, 0, drop_truncated=True)
    assert [e.rollout.prompt.index for e in kept] == [e.rollout.prompt.index for e in finished]
    assert len(transport.sequences) == len(finished)
    lost = float(len(sampled) - len(finished))
    assert dropped == {"dropped/truncated": lost, "dropped/total": lost}
    expected = rollout_metrics(sampled, step=0)
    metrics = rollout_metrics(kept, step=0, truncated=lost)
    for name in ("rollout/finished_share", "rollout/truncated_share"):
        assert metrics[name] == pytest.approx(expected[name])
