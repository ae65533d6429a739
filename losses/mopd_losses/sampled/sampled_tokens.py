"""``SampledTokens``: log-probabilities of both models for the tokens that the student sampled.

Only one-to-one spans: the probability of one token and that of several pieces together belong to
different events. Between two vocabularies even a shared token is not quite the same event (one side
may have a longer token with these first bytes), so that two models that agree on all texts may
still differ.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.core.span_targets import SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """One-to-one spans whose token has a probability on both sides; natural logs."""

    positions: Int64[Tensor, "compared"]
    rows: Int64[Tensor, "compared"]  # teacher rows
    student: Float[Tensor, "compared"]  # ln p(x) under the current weights; differentiable
    teacher: Float[Tensor, "compared"]  # ln t(x)
    sampled: Float[Tensor, "compared"]  # ln mu(x), under the distribution that x was drawn from
    ruled_out: Float[Tensor, "single_spans"]  # 1 where a side gives the token no probability

    @property
    def log_ratios(self) -> Tensor:
        """[compared], ``d = ln p(x) - ln t(x)``; its mean over samples of ``p`` is reverse KL."""
        return self.student - self.teacher


def sampled_tokens(student: StudentLogprobs, targets: SpanTargets) -> SampledTokens:
    """Select the one-to-one spans; tokens that either side rules out are skipped and counted."""
    single = targets.student_ends - targets.student_starts == 1
    single &= targets.teacher_ends - targets.teacher_starts == 1
    positions = targets.student_starts[single]
    current = student.logprobs(positions, targets.labels[positions])
    rows = targets.teacher_starts[single]
    teacher = targets.token_logprobs[rows].to(current.dtype)
    sampled = targets.sampled_logprobs[positions].to(current.dtype)
    # Not isfinite: a NaN must propagate, not be skipped.
    ruled_out = torch.isneginf(current.detach()) | torch.isneginf(teacher) | torch.isneginf(sampled)
    kept = ~ruled_out
    return SampledTokens(
        positions[kept],
        rows[kept],
        current[kept],
        teacher[kept],
        sampled[kept],
        ruled_out.to(current.dtype),
    )
