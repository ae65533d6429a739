"""The sizes that vLLM is started with, by arithmetic."""

from typing import Any

import pytest

from mopd_protocol.errors import ConfigError
from mopd_server.engines.vllm.memory import VllmLimits, derive_limits, describe
from mopd_server.settings import TeacherSettings

GIB = 1024**3


def limits(accelerator_bytes: int | None = None, **settings: Any) -> VllmLimits:
    """For a head of 150,000 rows in bfloat16 and 32,768 positions."""
    return derive_limits(
        TeacherSettings(model="m", **settings),
        logit_width=150_000,
        logit_bytes=2,
        model_positions=32_768,
        accelerator_bytes=accelerator_bytes,
    )


def test_a_step_holds_as_many_tokens_as_the_budget_has_room_for_their_logits() -> None:
    # Each token: 150,000 logits of 2 bytes and as many log-probabilities of 4.
    assert limits(logits_budget_bytes=900_000 * 700).max_num_batched_tokens == 700
    assert limits(logits_budget_bytes=900_000 * 700 - 1).max_num_batched_tokens == 699


def test_an_explicit_number_of_tokens_is_an_upper_bound() -> None:
    generous = limits(logits_budget_bytes=10**12, max_batch_tokens=100)
    assert (generous.max_num_batched_tokens, generous.max_num_seqs) == (100, 100)
    assert limits(logits_budget_bytes=10**12).max_num_seqs == 256


def test_the_budget_is_taken_off_what_the_engine_plans_with() -> None:
    planned = limits(accelerator_bytes=80 * GIB, logits_budget_bytes=8 * GIB)
    assert planned.gpu_memory_utilization == pytest.approx(0.8)
    assert limits().gpu_memory_utilization is None


def test_vllm_needs_a_position_to_write_to() -> None:
    assert (limits().max_model_len, limits().longest_sequence) == (32_768, 32_767)
    asked = limits(max_model_len=1000)
    assert (asked.max_model_len, asked.longest_sequence) == (1001, 1000)
    assert limits(max_model_len=32_767).longest_sequence == 32_767
    with pytest.raises(ConfigError, match=r"max-model-len 32768 is more .* at most 32767"):
        limits(max_model_len=32_768)


def test_top_k_is_bounded_by_the_head() -> None:
    assert limits(top_k_max=64).max_logprobs == 64
    assert limits(top_k_max=10**6).max_logprobs == 150_000


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"logits_budget_bytes": 899_999}, "no room for the 150000 logits .* at least 900000"),
        ({"logits_budget_bytes": 8 * GIB, "accelerator_bytes": 9 * GIB}, "leaves vLLM 0.01"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        limits(**settings)


def test_the_limits_are_told_in_a_sentence() -> None:
    settings = TeacherSettings(model="m", logits_budget_bytes=GIB, top_k_max=64)
    told = describe(limits(100 * GIB, logits_budget_bytes=GIB, top_k_max=64), settings)
    assert told == (
        "limits: 1193 tokens and 256 sequences in one step (logits budget 1024 MiB, "
        "--max-batch-tokens 16384), 32767 tokens a sequence, 64 log-probabilities a token; "
        "vLLM plans with 0.890 of the accelerator's memory (0.9 less that budget)"
    )
