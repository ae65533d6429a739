"""The rows that a micro-batch is trained on, against one whole forward pass per token."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
)

from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.packing import micro_batch
from mopd_trainer.student.student import Student
from tests.trainer.scored_examples import example
from tests.trainer.students import CPU, FAMILIES, rollout, student_of, tokenizer

#: (prompt, completion) of unequal lengths; ids that all three tokenizers have.
SEQUENCES = [
    ([40, 9, 77, 120], [55, 300, 8]),
    ([31], [201, 6, 7, 8, 9]),
    ([5, 6, 7, 8, 9, 10], [77]),
]


def examples_of(name: str) -> list[TrainingExample]:
    built = [
        rollout(name, completion, prompt_ids=prompt, teachers={"math": 1.0})
        for prompt, completion in SEQUENCES
    ]
    return [example(item) for item in built]


def gemma2(**sizes: Any) -> PreTrainedModel:
    """Caps its logits, at 30, which a fresh model never comes near."""
    return Gemma2ForCausalLM(Gemma2Config(**sizes, num_key_value_heads=2, head_dim=16))


def granite(**sizes: Any) -> PreTrainedModel:
    """Scales its logits."""
    return GraniteForCausalLM(
        GraniteConfig(**sizes, num_key_value_heads=2, logits_scaling=4.0, tie_word_embeddings=False)
    )


def other_student(make: Callable[..., PreTrainedModel], *, sharpness: float = 1.0) -> Student:
    torch.manual_seed(0)
    model = make(
        vocab_size=448,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)
    return Student(model, tokenizer("digit"), CPU)


def assert_rows_predict_their_tokens(student: Student, name: str, *, tolerance: float) -> None:
    student.model.eval()
    with torch.no_grad():
        rows = student.completion_logits(micro_batch(examples_of(name)))
        expected = torch.stack(
            [
                student.model(torch.tensor([[*prompt, *completion[:row]]])).logits[0, -1]
                for prompt, completion in SEQUENCES
                for row in range(len(completion))
            ]
        )
    assert rows.shape == (sum(len(c) for _, c in SEQUENCES), student.identity.logit_width)
    torch.testing.assert_close(rows, expected, rtol=0, atol=tolerance)
    # Neighbouring rows differ by far more than the tolerance, so a shift would be seen.
    assert (expected[1:] - expected[:-1]).abs().amax(dim=1).min() > 100 * tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_row_s_predicts_completion_token_s(family: str) -> None:
    assert_rows_predict_their_tokens(student_of(family), FAMILIES[family][1], tolerance=1e-5)


@pytest.mark.parametrize("make", [gemma2, granite])
def test_what_a_family_does_to_its_logits_is_kept(make: Callable[..., PreTrainedModel]) -> None:
    assert_rows_predict_their_tokens(other_student(make), "digit", tolerance=1e-6)


def test_a_cap_that_no_logit_comes_near_at_first_is_kept_when_logits_grow() -> None:
    student = other_student(gemma2, sharpness=0.01)
    with torch.no_grad():
        student.model.get_output_embeddings().weight.mul_(1e4)
        rows = student.completion_logits(micro_batch(examples_of("digit")))
    assert 1 < rows.abs().max() <= 30


def test_what_stands_in_the_padding_changes_no_row() -> None:
    student = student_of()
    student.model.eval()
    batch = micro_batch(examples_of("digit"))
    other = replace(batch, input_ids=torch.where(batch.attention_mask == 0, 99, batch.input_ids))
    assert not torch.equal(other.input_ids, batch.input_ids)
    with torch.no_grad():
        assert torch.equal(student.completion_logits(other), student.completion_logits(batch))
