"""The sampler: completions, finish reasons, and prompts that are too long."""

import pytest
import torch

from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.student.student import Student
from tests.trainer.students import MESSAGES, student_of

PROMPTS = [Prompt(index=index, messages=MESSAGES, teachers={"math": 1.0}) for index in range(6)]


def settings(**changes: object) -> RolloutConfig:
    return RolloutConfig.model_validate({"max_new_tokens": 4, **changes})


def test_samples_depend_only_on_seed_step_and_batch() -> None:
    def write(seed: int, step: int, batch: int) -> list[list[int]]:
        sampler = Sampler(student_of(), settings(), seed=seed)
        rollouts = sampler.sample_batch(PROMPTS[:2], step=step, batch=batch)
        return [rollout.completion.token_ids.tolist() for rollout in rollouts]

    places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    written = [write(*place) for place in places]
    assert [write(*place) for place in places] == written
    assert len({str(completions) for completions in written}) == 4


def test_a_rollout_has_its_prompt_and_its_ending() -> None:
    student = student_of()
    sampler = Sampler(student, settings(max_new_tokens=30), seed=0, version=2)
    rollouts = sampler.sample_batch(PROMPTS * 10, step=3, batch=0)
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout, prompt in zip(rollouts, PROMPTS * 10, strict=True):
        assert rollout.prompt is prompt
        assert rollout.prompt_token_ids.tolist() == student.prompt_token_ids(MESSAGES)
        ended = int(rollout.completion.token_ids[-1]) in student.table.roles.ending
        assert rollout.finish_reason == ("stop" if ended else "length")
        assert rollout.policy_version == 2


def test_a_prompt_and_its_longest_completion_may_fill_the_context() -> None:
    student = student_of()
    assert student.max_length is not None
    room = student.max_length - len(student.prompt_token_ids(MESSAGES))
    for tokens, completions in ((room, 1), (room + 1, 0)):
        sampler = Sampler(student, settings(max_new_tokens=tokens), seed=0)
        assert len(sampler.sample_batch(PROMPTS[:1], step=0, batch=0)) == completions
        assert sampler.pop_dropped()["prompt_too_long"] == 1 - completions


def written(sampler: Sampler) -> list[tuple[int, list[int]]]:
    """Version and ids of what is written now."""
    rollouts = sampler.sample_batch(PROMPTS, step=0, batch=0)
    return [(each.policy_version, each.completion.token_ids.tolist()) for each in rollouts]


@torch.no_grad()
def change(student: Student) -> None:
    """Other weights, as after a step."""
    for parameter in student.model.parameters():
        parameter.add_(torch.randn_like(parameter))


@pytest.mark.anyio
async def test_a_copy_writes_with_the_weights_that_were_pushed_last() -> None:
    student, config = student_of(), settings(max_new_tokens=12, max_staleness=1)
    sampler = Sampler(student, config, seed=0)
    before = written(sampler)
    torch.manual_seed(1)
    change(student)
    assert written(sampler) == before
    await sampler.push_weights(1)
    after = written(sampler)
    assert after == written(Sampler(student, config, seed=0, version=1))
    assert [ids for _, ids in after] != [ids for _, ids in before]


@pytest.mark.anyio
async def test_without_staleness_the_trained_weights_generate() -> None:
    student, config = student_of(), settings(max_new_tokens=12)
    sampler = Sampler(student, config, seed=0)
    before = written(sampler)
    torch.manual_seed(1)
    change(student)
    await sampler.push_weights(1)
    assert {version for version, _ in written(sampler)} == {1}
    assert [ids for _, ids in written(sampler)] != [ids for _, ids in before]
