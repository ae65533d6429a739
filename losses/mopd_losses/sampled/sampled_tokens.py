"""``SampledTokens``: what both models make of the tokens that the student really wrote.

Only where one student token spells what one teacher token spells: a token's probability and that
of several pieces together are answers to different questions. Between two vocabularies even a
shared token is not quite the same event (one side may have a longer token with these first bytes),
so that two models that agree on all texts may still differ here.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.core.span_targets import SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """One-to-one spans on which both sides have an opinion; natural logs."""

    slots: Int64[Tensor, "places"]
    student: Float[Tensor, "places"]  # ln p(x) under the weights of now; differentiable
    teacher: Float[Tensor, "places"]  # ln t(x)
    sampled: Float[Tensor, "places"]  # ln mu(x), under the distribution that x was drawn from
    ruled_out: Float[Tensor, "single_spans"]  # 1 where a side gives the token no probability at all

    @property
    def log_ratios(self) -> Tensor:
        """[places], ``d = ln p(x) - ln t(x)``; its mean over samples of ``p`` is reverse KL."""
        return self.student - self.teacher


def sampled_tokens(student: StudentLogprobs, targets: SpanTargets) -> SampledTokens:
    """The one-to-one spans; those whose token either side rules out are left out, and counted."""
    single = targets.student_ends - targets.student_starts == 1
    single &= targets.teacher_ends - targets.teacher_starts == 1
    slots = targets.student_starts[single]
    ours = student.logprobs(slots, targets.labels[slots])
    theirs = targets.token_logprobs[targets.teacher_starts[single]].to(ours.dtype)
    sampled = targets.sampled_logprobs[slots].to(ours.dtype)
    # Not isfinite: a NaN must be seen, not left out.
    ruled_out = torch.isneginf(ours.detach()) | torch.isneginf(theirs) | torch.isneginf(sampled)
    kept = ~ruled_out
    return SampledTokens(
        slots[kept], ours[kept], theirs[kept], sampled[kept], ruled_out.to(ours.dtype)
    )
