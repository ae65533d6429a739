"""Generation, compared with a reference without cache, batch or padding."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from mopd_protocol.errors import TrainingError
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.student.generation import Generation
from mopd_trainer.student.likely_tokens import likely_tokens
from mopd_trainer.student.student import Student
from tests.reference.sampling import greedy, nucleus
from tests.reference.teacher_scores import next_token_logprobs
from tests.trainer.students import CPU, FAMILIES, model_of, student_of, tokenizer

PROMPTS = [[40, 9, 77, 120, 31, 8, 8], [55], [300, 12, 201]]
#: Makes the nearly uniform distributions of a fresh model into ones with favourites.
SHARP = 12.0


def settings(**changes: Any) -> RolloutConfig:
    return RolloutConfig.model_validate({"max_new_tokens": 10, **changes})


def write(
    student: Student, prompts: list[list[int]] = PROMPTS, *, seed: int = 0, **changes: Any
) -> list[Generation]:
    return student.generate(prompts, settings(**changes), seed=seed)


def real_ids(student: Student) -> list[int]:
    return student.table.present.nonzero()[0].tolist()


def ids(sampled: list[Generation]) -> list[list[int]]:
    return [completion.token_ids for completion in sampled]


def test_a_seed_decides_what_is_written() -> None:
    student = student_of()
    first, again, other = (ids(write(student, seed=seed)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_what_others_do_to_the_process_s_generator_changes_nothing() -> None:
    student = student_of()
    expected = ids(write(student))

    def trained_meanwhile(*_: Any) -> None:
        torch.manual_seed(7)

    with student.model.register_forward_hook(trained_meanwhile):
        assert ids(write(student)) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_temperature_zero_is_the_most_likely_token_each_time(family: str) -> None:
    student = student_of(family, sharpness=SHARP)
    actual = ids(write(student, temperature=0))
    expected = [
        greedy(student.model, prompt, real_ids(student), student.table.roles.ending, 10)
        for prompt in PROMPTS
    ]
    assert actual == expected
    assert len({tuple(completion) for completion in actual}) == 3


@pytest.mark.parametrize("changes", [{}, {"temperature": 0}, {"top_p": 0.5}])
@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_diverged_weights_raise_a_training_error(weight: float, changes: dict[str, Any]) -> None:
    student = student_of()
    with torch.no_grad():
        student.model.get_output_embeddings().weight[7] = weight
    with pytest.raises(TrainingError) as caught:
        write(student, **changes)
    assert caught.value.key == "student.learning_rate"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_does_not_depend_on_the_batch(family: str) -> None:
    student = student_of(family, sharpness=SHARP)
    baseline = [write(student, [prompt], temperature=0)[0] for prompt in PROMPTS]
    together = write(student, temperature=0)
    assert ids(together) == ids(baseline)
    for example, other in zip(together, baseline, strict=True):
        np.testing.assert_allclose(example.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_returned_logprobs_are_those_of_the_sampled_distribution(
    family: str, temperature: float
) -> None:
    student = student_of(family, sharpness=SHARP)
    real = real_ids(student)
    for prompt, completion in zip(PROMPTS, write(student, temperature=temperature), strict=True):
        written = completion.token_ids
        expected = [
            next_token_logprobs(student.model, [*prompt, *written[:row]], real, temperature)[drawn]
            for row, drawn in enumerate(written)
        ]
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-4)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8)])
def test_entropies_are_those_of_the_sampled_distribution(temperature: float, top_p: float) -> None:
    student = student_of("qwen", sharpness=SHARP)
    real = real_ids(student)
    changes = settings(temperature=temperature, top_p=top_p)
    generations = student.generate(PROMPTS, changes, seed=0, keep_entropies=True)
    for prompt, completion in zip(PROMPTS, generations, strict=True):
        drawn, expected = completion.token_ids, list[float]()
        for row in range(len(drawn)):
            logprobs = next_token_logprobs(
                student.model, [*prompt, *drawn[:row]], real, temperature
            )
            kept = nucleus(logprobs, top_p).values()
            expected.append(-math.fsum(math.exp(value) * value for value in kept))
        assert completion.entropies is not None
        np.testing.assert_allclose(completion.entropies, expected, atol=2e-3)
    assert all(each.entropies is None for each in write(student))


@pytest.mark.parametrize("family", FAMILIES)
def test_likely_tokens_and_logprobs_of_a_completion(family: str) -> None:
    student = student_of(family, sharpness=SHARP)
    for prompt, completion in zip(PROMPTS, write(student, temperature=1), strict=True):
        likely = likely_tokens(student, prompt, completion.token_ids, k=3)
        assert likely is not None
        actual = likely.token_logprobs
        real = real_ids(student)
        for row, (ids, kept) in enumerate(zip(likely.ids, likely.logprobs, strict=True)):
            written = [*prompt, *completion.token_ids[:row]]
            expected = next_token_logprobs(student.model, written, real, 1.0)
            np.testing.assert_allclose(kept, [expected[token] for token in ids], atol=2e-4)
            assert kept[0] == pytest.approx(max(expected.values()), abs=2e-4)
        np.testing.assert_allclose(actual, completion.logprobs, atol=2e-4)


def test_tokens_are_drawn_with_their_probability() -> None:
    student = student_of(sharpness=SHARP)
    draws = 4000
    drawn = write(student, [PROMPTS[0]] * draws, temperature=0.5, max_new_tokens=1)
    counts = Counter(completion.token_ids[0] for completion in drawn)

    def distance(temperature: float) -> float:
        output = next_token_logprobs(student.model, PROMPTS[0], real_ids(student), temperature)
        return sum(abs(math.exp(value) - counts[i] / draws) for i, value in output.items()) / 2

    # 4000 draws from ~100 likely tokens are about 0.05 from their distribution.
    assert distance(0.5) < 0.1
    assert distance(1.0) > 0.3


def test_top_p_samples_from_the_nucleus_and_returns_its_logprobs() -> None:
    student = student_of(sharpness=SHARP)
    sampled = write(student, PROMPTS * 4, temperature=0.5, top_p=0.6)
    for prompt, completion in zip(PROMPTS * 4, sampled, strict=True):
        for row, token_id in enumerate(completion.token_ids):
            context = [*prompt, *completion.token_ids[:row]]
            kept = nucleus(next_token_logprobs(student.model, context, real_ids(student), 0.5), 0.6)
            assert token_id in kept
            assert completion.logprobs[row] == pytest.approx(kept[token_id], abs=2e-4)


@pytest.mark.parametrize("garbage", [1e30, -1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_rows_of_the_head_are_never_sampled(garbage: float, temperature: float) -> None:
    clean, model = student_of(), model_of("qwen")
    with torch.no_grad():
        model.get_output_embeddings().weight[clean.table.size :] = garbage
    dirty = Student(model, tokenizer("digit"), CPU)
    assert dirty.identity.logit_width > dirty.table.size
    expected, actual = (
        write(student, temperature=temperature, max_new_tokens=20) for student in (clean, dirty)
    )
    assert ids(actual) == ids(expected)
    assert [example.logprobs for example in actual] == [example.logprobs for example in expected]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_models_generation_config_is_ignored(temperature: float) -> None:
    model = model_of("qwen", sharpness=SHARP)
    model.generation_config = GenerationConfig(
        do_sample=True,
        repetition_penalty=5.0,
        no_repeat_ngram_size=1,
        top_k=1,
        min_p=0.9,
        temperature=0.1,
        max_length=3,
        suppress_tokens=list(range(5, 400)),
    )
    published = Student(model, tokenizer("digit"), CPU)
    expected = write(student_of(sharpness=SHARP), temperature=temperature)
    assert ids(write(published, temperature=temperature)) == ids(expected)


def test_a_completion_ends_with_its_first_ending_token() -> None:
    student = student_of()
    completions = ids(write(student, [[55], [8, 9]] * 50, max_new_tokens=30))
    endings = set(student.table.roles.ending)
    ended = [completion for completion in completions if completion[-1] in endings]
    assert 0 < len(ended) < len(completions)
    for completion in completions:
        assert endings.isdisjoint(completion[:-1])
        assert len(completion) == 30 or completion[-1] in endings
