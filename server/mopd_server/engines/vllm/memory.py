"""What vLLM may take at once, derived from the memory that its logits may use.

vLLM computes log-probabilities of prompts from the logits of every token that it schedules in one
step, next to the memory that its own profile run measured. So the number of tokens in a step is
what a stated budget has room for, and the budget is taken off the share of the accelerator that
vLLM may plan with.
"""

from dataclasses import dataclass

from mopd_protocol.errors import ConfigError
from mopd_server.settings import TeacherSettings

#: Bytes of one entry of the log-softmax, which vLLM takes in float32 beside the logits themselves.
_LOG_SOFTMAX_BYTES = 4

#: vLLM's own default number of sequences in one step.
_MAX_SEQUENCES = 256

#: Less of an accelerator than this holds no model worth serving.
_LEAST_UTILIZATION = 0.05

_MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class VllmLimits:
    """The sizes that vLLM is started with."""

    max_model_len: int
    """Tokens of a sequence as vLLM counts them: with the one that it always writes."""
    max_num_batched_tokens: int
    max_num_seqs: int
    max_logprobs: int
    gpu_memory_utilization: float | None
    """Share of the accelerator's memory that vLLM plans with; None on a CPU."""

    @property
    def longest_sequence(self) -> int:
        """Tokens of prompt and completion that can be scored."""
        return self.max_model_len - 1


def derive_limits(
    settings: TeacherSettings,
    *,
    logit_width: int,
    logit_bytes: int,
    model_positions: int,
    accelerator_bytes: int | None,
) -> VllmLimits:
    """The limits of a model whose head has ``logit_width`` rows.

    Args:
        settings: what the user asked for.
        logit_width: rows of the language-model head.
        logit_bytes: bytes of one logit as the head computes it.
        model_positions: tokens that the model can tell apart by position.
        accelerator_bytes: memory of one accelerator; None on a CPU, whose memory is not planned.

    Raises:
        ConfigError: when the budget has no room for one token, or the model none for the budget,
            or sequences are asked for that are longer than the model's.
    """
    bytes_per_token = (logit_bytes + _LOG_SOFTMAX_BYTES) * logit_width
    tokens = settings.logits_budget_bytes // bytes_per_token
    if tokens < 1:
        raise ConfigError(
            f"a logits budget of {settings.logits_budget_bytes} bytes has no room for the "
            f"{logit_width} logits of one token; expected at least {bytes_per_token} "
            "(--logits-mebibytes)"
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
    """The limits in one sentence, for the log."""
    memory = (
        ""
        if limits.gpu_memory_utilization is None
        else f"; vLLM plans with {limits.gpu_memory_utilization:.3f} of the accelerator's memory "
        f"({settings.gpu_memory_utilization:g} less that budget)"
    )
    return (
        f"limits: {limits.max_num_batched_tokens} tokens and {limits.max_num_seqs} sequences in "
        f"one step (logits budget {settings.logits_budget_bytes // _MEBIBYTE} MiB, "
        f"--max-batch-tokens {settings.max_batch_tokens}), {limits.longest_sequence} tokens a "
        f"sequence, {limits.max_logprobs} log-probabilities a token{memory}"
    )


def _engine_length(asked: int | None, positions: int) -> int:
    """vLLM writes one token after what it reads, so a sequence may hold one position less."""
    if asked is not None and asked > positions - 1:
        raise ConfigError(
            f"--max-model-len {asked} is more than vLLM can score of the {positions} positions of "
            f"this model, of which it keeps one to write to; expected at most {positions - 1}"
        )
    return positions if asked is None else asked + 1


def _utilization(settings: TeacherSettings, accelerator_bytes: int | None) -> float | None:
    if accelerator_bytes is None:
        return None
    left = settings.gpu_memory_utilization - settings.logits_budget_bytes / accelerator_bytes
    if left < _LEAST_UTILIZATION:
        raise ConfigError(
            f"a logits budget of {settings.logits_budget_bytes // _MEBIBYTE} MiB leaves vLLM "
            f"{left:.2f} of this accelerator's {accelerator_bytes // _MEBIBYTE} MiB; expected at "
            f"least {_LEAST_UTILIZATION} (lower --logits-mebibytes or raise "
            "--gpu-memory-utilization)"
        )
    return left
