"""Sampling with transformers: greedy as on the CPU, reproducible, with its own probabilities."""

import numpy as np
import pytest
import torch

from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.student.student import Student
from tests.trainer.students import CPU, FAMILIES, MESSAGES, model_of, tokenizer

pytestmark = pytest.mark.gpu

#: Makes the nearly uniform distributions of a fresh model into ones with favourites.
SHARP = 12.0
PROMPTS = [Prompt(index=index, messages=MESSAGES, teachers={"math": 1.0}) for index in range(6)]


def student_on(where: torch.device, family: str, compute: torch.dtype = torch.float32) -> Student:
    model = model_of(family, sharpness=SHARP)
    return Student(model, tokenizer(FAMILIES[family][1]), where, compute_dtype=compute)


def sampled(student: Student, *, seed: int = 0, **changes: object) -> list[Rollout]:
    settings = RolloutConfig.model_validate({"max_new_tokens": 24, **changes})
    return Sampler(student, settings, seed=seed).sample_batch(PROMPTS, step=0, batch=0)


def ids(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.completion.token_ids.tolist() for rollout in rollouts]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_completions_are_those_of_the_cpu(family: str, device: torch.device) -> None:
    own, others = (sampled(student_on(each, family), temperature=0) for each in (device, CPU))
    assert ids(own) == ids(others)
    for rollout, other in zip(own, others, strict=True):
        np.testing.assert_allclose(rollout.sampled_logprobs, other.sampled_logprobs, atol=2e-4)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_seed_decides_what_is_sampled(compute: torch.dtype, device: torch.device) -> None:
    student = student_on(device, "qwen", compute)
    first, again, other = (ids(sampled(student, seed=seed, temperature=1)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert len({str(each) for each in first}) > 1  # equal prompts, separate draws


@pytest.mark.parametrize("family", FAMILIES)
def test_probabilities_of_samples_are_those_of_scoring(family: str, device: torch.device) -> None:
    student = student_on(device, family)
    for rollout in sampled(student, temperature=1):
        tokens = rollout.completion.token_ids.tolist()
        scored = student.logprobs(rollout.prompt_token_ids.tolist(), tokens)
        np.testing.assert_allclose(rollout.sampled_logprobs, scored, atol=2e-4)


def test_a_copy_for_sampling_ahead_is_on_the_device(device: torch.device) -> None:
    student = student_on(device, "qwen")
    own = sampled(student, temperature=1)
    assert ids(sampled(student, temperature=1, max_staleness=1)) == ids(own)
    assert {parameter.device for parameter in student.copy().model.parameters()} == {device}
