"""Tests of vLLM's limits, derived from the budget of the logits."""

from typing import Any

import pytest

from mopd_protocol.errors import ConfigError
from mopd_server.engines.vllm.memory import VllmLimits, derive_limits, describe
from mopd_server.settings import TeacherSettings

GIB = 1024**3


def limits(accelerator_bytes: int | None = None, **settings: Any) -> VllmLimits:
    """Limits of a head of 150,000 rows in bfloat16 and 32,768 positions."""
    return derive_limits(
        TeacherSettings(model="m", **settings),
        logit_width=150_000,
        logit_bytes=2,
        model_positions=32_768,
        accelerator_bytes=accelerator_bytes,
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Each token: 150,000 logits of 2 bytes and as many log-probabilities of 4.
        ({"logits_budget_bytes": 900_000 * 700}, {"max_num_batched_tokens": 700}),
        ({"logits_budget_bytes": 900_000 * 700 - 1}, {"max_num_batched_tokens": 699}),
        (
            {"logits_budget_bytes": 10**12, "max_batch_tokens": 100},
            {"max_num_batched_tokens": 100, "max_num_seqs": 100},
        ),
        ({"logits_budget_bytes": 10**12}, {"max_num_seqs": 256}),
        # The budget is subtracted from the share of the accelerator.
        (
            {"accelerator_bytes": 80 * GIB, "logits_budget_bytes": 8 * GIB},
            {"gpu_memory_utilization": pytest.approx(0.8)},
        ),
        ({}, {"gpu_memory_utilization": None}),
        # vLLM generates a token at the last position.
        ({}, {"max_model_len": 32_768, "longest_sequence": 32_767}),
        ({"max_model_len": 1000}, {"max_model_len": 1001, "longest_sequence": 1000}),
        ({"max_model_len": 32_767}, {"longest_sequence": 32_767}),
        # top_k is limited by the head.
        ({"top_k_max": 64}, {"max_logprobs": 64}),
        ({"top_k_max": 10**6}, {"max_logprobs": 150_000}),
    ],
)
def test_limits(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    derived = limits(**settings)
    assert {name: getattr(derived, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "key", "numbers"),
    [
        (
            {"logits_budget_bytes": 899_999},
            "logits_budget_bytes",
            ("150000", "900000", "mebibytes 1 "),
        ),
        (
            {"logits_budget_bytes": 8 * GIB, "accelerator_bytes": 9 * GIB},
            "logits_budget_bytes",
            ("9216", "8192", "0.01", "0.05", "mebibytes 7833 "),
        ),
        (  # not a negative share, and no budget that helps
            {"logits_budget_bytes": GIB, "accelerator_bytes": 9 * GIB, "pool_resident": 20},
            "logits_budget_bytes",
            ("0.00", "0.05", "resident"),
        ),
        ({"max_model_len": 32_768}, "max_model_len", ("32768", "32767")),
    ],
)
def test_impossible_settings_are_an_error(
    settings: dict[str, Any], key: str, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        limits(**settings)
    assert caught.value.key == key
    assert all(number in str(caught.value) for number in numbers)


def test_log_message_contains_all_limits() -> None:
    settings = TeacherSettings(model="m", logits_budget_bytes=GIB, top_k_max=64)
    message = describe(limits(100 * GIB, logits_budget_bytes=GIB, top_k_max=64), settings)
    for number in ("1193 tokens", "256 sequences", "1024 MiB", "16384", "32767", "64", "0.890"):
        assert number in message
