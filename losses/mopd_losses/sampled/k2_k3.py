"""Supervised losses on the sampled token: the estimates k2 and k3 of KL, differentiated as such.

With ``d = ln p(x) - ln t(x)`` and ``x`` drawn from ``p`` itself (http://joschu.net/blog/kl-approx.html):

    k1 = d                  mean: reverse KL                 mean gradient: zero
    k2 = d^2 / 2            mean: near reverse KL            mean gradient: that of reverse KL
    k3 = e^-d - 1 + d       mean: reverse KL                 mean gradient: that of *forward* KL

What an estimate is worth as a number says nothing about its gradient, for the distribution that is
averaged over moves too. So k1 is no loss (``policy_gradient`` is what makes one of it), and k3
teaches what forward KL teaches, from samples of the student: a weight ``t / p`` on each token,
unbiased and of any size. All of this holds for samples of ``p``: fresh ones, at temperature 1,
without top-p. Both are zero, with zero gradient, exactly where ``p(x) = t(x)``.
(losses: section 4.9, where the three gradients were found by enumeration.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.loss_output import LossOutput
from mopd_losses.core.span_targets import SpanTargets, span_targets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.sampled.sampled_tokens import sampled_tokens

#: Above this ``ln(t / p)``, k3 goes on as a straight line: e^89 is not a float32.
K3_LINE = 20.0


def k2(log_ratios: Float[Tensor, "*places"]) -> Float[Tensor, "*places"]:
    """``d^2 / 2``, in nats; its derivative is ``d``."""
    return log_ratios.square() / 2


def k3(log_ratios: Float[Tensor, "*places"]) -> Float[Tensor, "*places"]:
    """``e^-d - 1 + d``, in nats; its derivative is ``1 - e^-d``.

    Continued by its tangent below ``d = -20``, so that what the student should say a billion times
    more often has a finite gradient, and one all the same.
    """
    bounded = log_ratios.clamp_min(-K3_LINE)
    # Above the line this has no gradient at all: one that is added and taken away again would
    # leave nothing of the curve's own in float32.
    beyond = (-K3_LINE - log_ratios).relu()
    steepest = torch.expm1(torch.tensor(K3_LINE, dtype=log_ratios.dtype))
    return torch.expm1(-bounded) + bounded + beyond * steepest


@dataclass(frozen=True, eq=False)
class K2Loss:
    """k2 on one-to-one spans: a ``Loss``. Targets are of a teacher that scored at temperature 1."""

    def targets(
        self, comparisons: Sequence[AlignedPair], slot_offsets: Sequence[int]
    ) -> SpanTargets:
        """See ``Loss``."""
        return span_targets(comparisons, slot_offsets)

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``; measures ``log_ratio`` and ``ruled_out`` as ``policy_gradient`` does."""
        return _on_sampled_tokens(k2, student, targets)


@dataclass(frozen=True, eq=False)
class K3Loss:
    """k3 on one-to-one spans: a ``Loss``. Targets are of a teacher that scored at temperature 1."""

    def targets(
        self, comparisons: Sequence[AlignedPair], slot_offsets: Sequence[int]
    ) -> SpanTargets:
        """See ``Loss``."""
        return span_targets(comparisons, slot_offsets)

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``; measures ``log_ratio`` and ``ruled_out`` as ``policy_gradient`` does."""
        return _on_sampled_tokens(k3, student, targets)


def _on_sampled_tokens(
    estimate: Callable[[Tensor], Tensor], student: StudentLogprobs, targets: SpanTargets
) -> LossOutput:
    tokens = sampled_tokens(student, targets)
    return LossOutput(
        student.zeros().index_add(0, tokens.slots, estimate(tokens.log_ratios)),
        {"log_ratio": tokens.log_ratios.detach(), "ruled_out": tokens.ruled_out},
    )
