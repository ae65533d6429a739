"""Limits of vLLM's steps, derived from the memory budget of its logits.

vLLM computes prompt log-probabilities from the logits of every token of a step, in addition to the
memory that its own profile run measures. The budget limits the tokens of a step, and is subtracted
import math
from the share of the accelerator that vLLM plans with.
"""

import math
from dataclasses import dataclass

from mopd_protocol.errors import ConfigError
from mopd_server.settings import TeacherSettings

#: Bytes of one entry of the log-softmax, which vLLM stores in float32 next to the logits.
_LOG_SOFTMAX_BYTES = 4

#: vLLM's default number of sequences in one step.
_MAX_SEQUENCES = 256

#: A smaller share of an accelerator is too small for any useful model.
_MIN_UTILIZATION = 0.05

_MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class VllmLimits:
    """Sizes that vLLM is started with."""

    max_model_len: int
    """Tokens of a sequence as counted by vLLM, including the one that it always generates."""
    max_num_batched_tokens: int
    max_num_seqs: int
    max_logprobs: int
    gpu_memory_utilization: float | None
    """Share of the accelerator's memory for vLLM; None on a CPU."""

    @property
    def longest_sequence(self) -> int:
        """Maximum tokens of prompt and completion."""
        return self.max_model_len - 1


def derive_limits(
    settings: TeacherSettings,
    *,
    logit_width: int,
    logit_bytes: int,
    model_positions: int,
    accelerator_bytes: int | None,
) -> VllmLimits:
    """Derive the limits of a model.

    Args:
        settings: the user's limits and budgets.
        logit_width: rows of the language-model head.
        logit_bytes: bytes of one logit in the dtype of the head.
        model_positions: maximum positions of the model.
        accelerator_bytes: memory of one accelerator; None on a CPU, whose memory is not planned.

    Raises:
        ConfigError: if the budget is below one token, or leaves no memory for the model, or
            ``max_model_len`` exceeds the model.
    """
    bytes_per_token = (logit_bytes + _LOG_SOFTMAX_BYTES) * logit_width
    tokens = settings.logits_budget_bytes // bytes_per_token
    if tokens < 1:
        raise ConfigError(
            f"--logits-mebibytes: too small for the {logit_width} logits of one token (found "
            f"{settings.logits_budget_bytes} bytes, expected at least {bytes_per_token}). Set "
            f"--logits-mebibytes {math.ceil(bytes_per_token / _MEBIBYTE)} or more",
            key="logits_budget_bytes",
        )
    tokens = min(tokens, settings.max_batch_tokens)
    return VllmLimits(
        max_model_len=_engine_length(settings.max_model_len, model_positions),
        max_num_batched_tokens=tokens,
        max_num_seqs=min(_MAX_SEQUENCES, tokens),
        max_logprobs=min(settings.top_k_max, logit_width),
        gpu_memory_utilization=_utilization(settings, accelerator_bytes),
    )


def describe(limits: VllmLimits, settings: TeacherSettings) -> str:
    """Return the log message of the limits."""
    engines = f" for {settings.pool_resident} engines" if settings.pool_resident > 1 else ""
    memory = (
        ""
        if limits.gpu_memory_utilization is None
        else f"; gpu_memory_utilization {limits.gpu_memory_utilization:.3f} "
        f"({settings.gpu_memory_utilization:g}{engines} less the budget)"
    )
    return (
        f"limits: {limits.max_num_batched_tokens} tokens and {limits.max_num_seqs} sequences per "
        f"step (logits budget {settings.logits_budget_bytes // _MEBIBYTE} MiB, "
        f"--max-batch-tokens {settings.max_batch_tokens}), {limits.longest_sequence} tokens per "
        f"sequence, {limits.max_logprobs} log-probabilities per token{memory}"
    )


def _engine_length(requested: int | None, positions: int) -> int:
    """Add the token that vLLM always generates: a scored sequence has one position less."""
    if requested is not None and requested > positions - 1:
        raise ConfigError(
            f"--max-model-len: above the limit of the model (found {requested}, expected at most "
            f"{positions - 1}: vLLM needs one of the {positions} positions to generate a token)",
            key="max_model_len",
        )
    return positions if requested is None else requested + 1


def _utilization(settings: TeacherSettings, accelerator_bytes: int | None) -> float | None:
    if accelerator_bytes is None:
        return None
    available = settings.gpu_memory_utilization / max(settings.pool_resident, 1)
    share = available - settings.logits_budget_bytes / accelerator_bytes
    if share < _MIN_UTILIZATION:
        most = int((available - _MIN_UTILIZATION) * accelerator_bytes / _MEBIBYTE)
        fix = "Raise --gpu-memory-utilization, or reduce the resident teachers of the pool"
        if most >= 1:
            fix = f"Set --logits-mebibytes {most} or less, or raise --gpu-memory-utilization"
        raise ConfigError(
            f"--logits-mebibytes: leaves too little of the accelerator's "
            f"{accelerator_bytes // _MEBIBYTE} MiB for vLLM (found a share of "
            f"{max(share, 0):.2f} with {settings.logits_budget_bytes // _MEBIBYTE} MiB, expected "
            f"at least {_MIN_UTILIZATION}). {fix}.",
            key="logits_budget_bytes",
        )
    return share
