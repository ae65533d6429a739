"""Completions that the student continues behind corrected tokens, with a teacher in process."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from mopd_protocol.samples import Prompt
from mopd_trainer.collection import collect
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.corrections import Corrector, corrected_rollout
from mopd_trainer.data.corrections import Correction, implausible_rows
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.metrics.step_metrics import Metrics, rollout_metrics
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.student.generation import Generation
from mopd_trainer.teachers.scoring import RolloutScorer
from tests.server.tiny_teachers import teacher_of
from tests.trainer.in_process import Recorded, scorer_of, teacher_config
from tests.trainer.students import MESSAGES, ids_of, model_of, student_of, table, tokenizer
from tests.trainer.students import rollout as rollout_of

pytestmark = pytest.mark.anyio

PROMPTS = [Prompt(index=index, messages=MESSAGES, teachers={"math": 1.0}) for index in range(6)]
RATIO = 0.3
LENGTH = 8


@asynccontextmanager
async def scored_by() -> AsyncGenerator[tuple[RolloutScorer, Recorded]]:
    """A teacher that is sure of other tokens than the student's."""
    transport = Recorded(teacher_of(model_of("qwen", seed=1, sharpness=5), tokenizer("digit")).app)
    config = teacher_config(loss={"type": "topk_kl"})
    async with scorer_of(student_of().identity, {"math": (transport, config)}) as scorer:
        yield scorer, transport


def settings(rounds: int, *, max_new_tokens: int = LENGTH) -> RolloutConfig:
    return RolloutConfig(
        max_new_tokens=max_new_tokens,
        generation_batch_size=3,
        temperature=1.0,
        corrections=rounds,
        correction_ratio=RATIO,
        correction_significance=100,
    )


async def collected(
    rounds: int,
    *,
    sampler: Sampler | None = None,
    config: RolloutConfig | None = None,
    drop_truncated: bool = False,
) -> tuple[list[TrainingExample], Metrics, Recorded]:
    """The examples of a step with so many rounds of corrections."""
    config = config or settings(rounds)
    sampler = sampler or Sampler(student_of(), config, seed=0, keep_topk=64)
    async with scored_by() as (scorer, transport):
        corrector = Corrector(sampler, scorer, student_of().identity, config, seed=0)
        examples, metrics = await collect(
            PROMPTS, sampler, scorer, 0, corrector=corrector, drop_truncated=drop_truncated
        )
    return examples, metrics, transport


def written_ids(example: TrainingExample) -> list[int]:
    """The ids of a completion."""
    return example.rollout.completion.token_ids.tolist()


async def test_each_round_corrects_the_next_implausible_token() -> None:
    rounds = [await collected(count) for count in range(4)]
    corrected = 0
    for (before, *_), (after, *_) in pairwise(rounds):
        assert [e.rollout.prompt.index for e in after] == [0, 1, 2, 3, 4, 5]
        for old, new in zip(before, after, strict=True):
            rows = implausible_rows(old.scores[0].score, RATIO)
            if not len(rows):
                assert written_ids(new) == written_ids(old)
                continue
            first = int(rows[0])
            likeliest = int(old.scores[0].score.topk.ids[first, 0])
            assert old.rollout.student_topk_ids is not None
            # One tokenizer: the student's only token that agrees is the teacher's.
            if likeliest not in old.rollout.student_topk_ids[first]:
                continue
            assert written_ids(new)[: first + 1] == [*written_ids(old)[:first], likeliest]
            assert new.rollout.corrected_tokens[-1] == first
            assert len(written_ids(new)) <= LENGTH
            corrected += 1
    assert corrected > 4
    shares = [
        rollout_metrics(examples, step=0)["rollout/corrected_share"] for examples, *_ in rounds
    ]
    assert shares[0] == 0
    assert shares[1] > 0.5


async def test_scores_and_logprobs_are_of_the_corrected_completion() -> None:
    student = student_of()
    examples, *_ = await collected(2)
    async with scored_by() as (scorer, _):
        again = await scorer.score([example.rollout for example in examples])
    for example, scored in zip(examples, again, strict=True):
        score = example.scores[0].score
        assert score.completion.token_ids.tolist() == written_ids(example)
        assert score.topk.logprobs == pytest.approx(scored.scores[0].score.topk.logprobs, abs=1e-4)
        rollout = example.rollout
        expected = student.logprobs(rollout.prompt_token_ids.tolist(), written_ids(example))
        sampled = np.delete(np.arange(len(expected)), rollout.corrected_tokens)
        assert rollout.sampled_logprobs is not None
        assert rollout.sampled_logprobs[sampled] == pytest.approx(expected[sampled], abs=1e-4)
        assert (rollout.sampled_logprobs[list(rollout.corrected_tokens)] == 0).all()
        assert rollout.student_topk_ids is not None
        assert len(rollout.student_topk_ids) == len(written_ids(example))


async def test_only_changed_completions_are_scored_again() -> None:
    examples, _, transport = await collected(1)
    first, later = transport.requests[:2], transport.requests[2:]
    corrected = [written_ids(e) for e in examples if e.rollout.corrected_tokens]
    assert sum(len(body["sequences"]) for body in first + later) == 6 + len(corrected)
    _, _, none = await collected(0)
    assert len(none.sequences) == 6


async def test_corrected_completions_are_a_function_of_the_seed() -> None:
    (first, *_), (second, *_) = [await collected(2) for _ in range(2)]
    assert [written_ids(each) for each in first] == [written_ids(each) for each in second]


async def test_a_corrected_completion_without_an_end_is_dropped_and_counted() -> None:
    all_of_them, *_ = await collected(2)
    kept, metrics, _ = await collected(2, drop_truncated=True)
    assert all(example.rollout.finish_reason == "stop" for example in kept)
    assert metrics["dropped/truncated"] == len(all_of_them) - len(kept) > 0
    assert metrics["dropped/total"] == metrics["dropped/truncated"]


class Lengths(Sampler):
    """Sampler that keeps the greatest length that a request could reach."""

    longest = 0

    async def generate(
        self, prompts: Sequence[Sequence[int]], settings: RolloutConfig, *, seed: int
    ) -> list[Generation]:
        """See ``Sampler``."""
        self.longest = max(self.longest, *(len(p) + settings.max_new_tokens for p in prompts))
        return await super().generate(prompts, settings, seed=seed)


@pytest.mark.parametrize("shorter_by", [0, 100])
async def test_corrected_completions_stay_in_the_context(shorter_by: int) -> None:
    student = student_of()
    assert student.max_length is not None
    room = student.max_length - len(student.prompt_token_ids(MESSAGES)) - shorter_by
    config = settings(2, max_new_tokens=room)
    sampler = Lengths(student, config, seed=0, keep_topk=64)
    examples, *_ = await collected(2, sampler=sampler, config=config)
    assert {len(example.rollout.corrected_tokens) > 0 for example in examples} == {True}
    assert 0 < sampler.longest <= student.max_length
    lengths = [len(written_ids(example)) for example in examples]
    assert max(lengths) <= room


def test_a_corrected_rollout_has_the_logprobs_of_what_was_sampled() -> None:
    written = ids_of("digit", "12+3")
    topk_ids = np.array([[each, each + 1] for each in written])
    rollout = replace(rollout_of("digit", written, topk_ids=topk_ids), corrected_tokens=(0, 3))
    other, ending = ids_of("digit", "7", "<|end|>")
    continuation = Generation([written[2], ending], [-0.5, -0.25], np.array([[7, 8], [8, 7]]))
    result = corrected_rollout(Correction(rollout, 1, other), table("digit"), continuation)
    assert result.completion.token_ids.tolist() == [written[0], other, written[2], ending]
    assert result.sampled_logprobs is not None
    assert result.sampled_logprobs.tolist() == [-1.0, 0.0, -0.5, -0.25]
    assert result.finish_reason == "stop"
    assert result.corrected_tokens == (0, 1)
    assert result.student_topk_ids is not None
    assert result.student_topk_ids.tolist() == [*topk_ids[:2].tolist(), [7, 8], [8, 7]]
    cut = corrected_rollout(Correction(rollout, 3, other), table("digit"), None)
    assert (cut.finish_reason, cut.corrected_tokens) == ("length", (0, 3))
