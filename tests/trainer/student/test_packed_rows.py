"""Several examples in one row: the losses and gradients of separate, padded rows."""

import logging
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.profiler import profile
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from mopd_protocol.errors import ConfigError
from mopd_trainer.config.student import StudentConfig
from mopd_trainer.data.packing import MicroBatch, micro_batch
from mopd_trainer.student.packed_attention import ExampleMask, packed_attention
from mopd_trainer.student.student import Student
from tests.trainer.scored_examples import example
from tests.trainer.students import CPU, rollout, tokenizer

SIZES = {
    "vocab_size": 448,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
#: Rotary and absolute positions, norms on both sides, experts, and windows shorter than examples.
PACKED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gpt2": GPT,
    "gpt_neox": {"num_key_value_heads": 4},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4},
}
#: State-space layers, another implementation, and attention in chunks of the row.
PADDED: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64},
    "llama": {"attention_chunk_size": 4},
}
LENGTHS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6)


def model_of(family: str, sizes: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | sizes)
    return AutoModelForCausalLM.from_config(config)


def student_of(
    family: str,
    packing: Any = "packed",
    attention: str = "auto",
    sizes: dict[str, dict[str, Any]] = PACKED,
) -> Student:
    model = model_of(family, sizes.get(family, {}))
    return Student(model, tokenizer("digit"), CPU, packing=packing, attention=attention)


def batch_of(lengths: list[tuple[int, int]], *, packed: bool) -> MicroBatch:
    """A micro-batch of examples with prompts and completions of these lengths."""
    ids = [(7 * place) % 400 + 10 for place in range(24 * len(lengths))]
    items = [
        rollout(
            "digit", ids[24 * n + 12 : 24 * n + 12 + completion], prompt_ids=ids[24 * n :][:prompt]
        )
        for n, (prompt, completion) in enumerate(lengths)
    ]
    return micro_batch([example(item) for item in items], packed=packed)


def gradients(student: Student, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the completion tokens, and the gradient of a function of them."""
    student.model.zero_grad()
    logits = student.completion_logits(batch)
    weights = torch.linspace(-1, 1, logits.numel()).reshape(logits.shape).sin()
    (logits.log_softmax(dim=1) * weights).sum().backward()
    parts = [p.grad.flatten() for p in student.model.parameters() if p.grad is not None]
    return logits.detach(), torch.cat(parts)


@pytest.mark.parametrize("family", PACKED)
@settings(max_examples=15)
@given(lengths=LENGTHS)
def test_logits_and_gradients_are_those_of_padded_rows(
    family: str, lengths: list[tuple[int, int]]
) -> None:
    student = student_of(family)
    assert student.packs
    logits, gradient = gradients(student, batch_of(lengths, packed=True))
    expected_logits, expected = gradients(student, batch_of(lengths, packed=False))
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-5)
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


def masks_of(student: Student, run: Callable[[], Any]) -> list[Any]:
    """Return what the attention layers receive as their mask."""
    masks: list[Any] = []
    layers = [m for name, m in student.model.named_modules() if name.endswith("self_attn")]
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda _, arguments, named: masks.append(named["attention_mask"]), with_kwargs=True
        )
    run()
    return masks


def test_no_layer_has_a_mask_of_all_pairs_of_tokens() -> None:
    student = student_of("llama")
    batch = batch_of([(3, 4), (2, 2), (5, 1)], packed=True)
    for mask in masks_of(student, lambda: student.completion_logits(batch)):
        assert isinstance(mask, ExampleMask)
        assert mask.examples == ((0, 7, None), (7, 11, None), (11, 17, None))


def test_an_example_longer_than_the_window_has_a_separate_mask() -> None:
    student = student_of("mistral")
    batch = batch_of([(3, 4), (2, 1)], packed=True)
    for mask in masks_of(student, lambda: student.completion_logits(batch)):
        (_, _, window), (_, _, causal) = mask.examples
        assert window.int().tolist() == [
            [int(0 <= query - key < 4) for key in range(7)] for query in range(7)
        ]
        assert causal is None


def test_memory_of_the_gradient_is_linear_in_the_length_of_the_row() -> None:
    """The gradient of a slice of a row would be as long as the row, for each example."""

    def zeros(examples: int) -> int:
        length = 8 * examples
        row = torch.ones(1, 2, length, 4, requires_grad=True)
        bounds = tuple((start, start + 8, None) for start in range(0, length, 8))
        output, _ = packed_attention(torch.nn.Module(), row, row, row, ExampleMask(bounds))
        with profile(record_shapes=True) as profiled:
            output.sum().backward()
        events = profiled.events() or ()
        return sum(prod(e.input_shapes[0]) for e in events if e.name == "aten::zero_")

    assert zeros(16) <= 4 * zeros(4)


def test_other_forward_passes_have_the_masks_of_transformers() -> None:
    student = student_of("llama")
    ids, positions = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 0, 1]])
    for mask in masks_of(
        student, lambda: student.model(ids, position_ids=positions, use_cache=False)
    ):
        assert mask.shape == (1, 1, 4, 4)


@pytest.mark.parametrize("family", PADDED)
def test_models_that_mix_the_examples_of_a_row_are_padded(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        student = student_of(family, "auto", sizes=PADDED)
    assert not student.packs
    assert sum("padded" in message for message in caplog.messages) == 1
    with pytest.raises(ConfigError) as caught:
        student_of(family, "packed", sizes=PADDED)
    assert caught.value.key == "student.packing"


def test_eager_attention_is_packed_on_request_only() -> None:
    assert not student_of("llama", "auto", "eager").packs
    student = student_of("llama", "packed", "eager")
    assert student.packs
    lengths = [(3, 4), (2, 2)]
    _, gradient = gradients(student, batch_of(lengths, packed=True))
    _, expected = gradients(student_of("llama"), batch_of(lengths, packed=False))
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(("family", "attention"), [("mpt", "sdpa"), ("llama", "flash_attention_2")])
def test_unsupported_attention_is_a_config_error(family: str, attention: str) -> None:
    with pytest.raises(ConfigError) as caught:
        student_of(family, "auto", attention)
    assert caught.value.key == "student.attn_implementation"


def test_flash_attention_needs_half_precision() -> None:
    with pytest.raises(ValidationError, match="attn_implementation"):
        StudentConfig(model="tiny", attn_implementation="flash_attention_2")
    StudentConfig(model="tiny", attn_implementation="flash_attention_2", dtype="bfloat16")
