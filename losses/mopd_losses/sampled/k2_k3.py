"""Supervised losses on the sampled text: the estimates k2 and k3 of KL, differentiated as such.

With ``d = ln p(x) - ln t(x)`` of a span's text ``x``, which is drawn from ``p`` itself
(http://joschu.net/blog/kl-approx.html):

    k1 = d                  mean: reverse KL                 mean gradient: zero
    k2 = d^2 / 2            mean: near reverse KL            mean gradient: that of reverse KL
    k3 = e^-d - 1 + d       mean: reverse KL                 mean gradient: that of *forward* KL

The quality of an estimate's value is unrelated to its gradient, because the distribution that is
averaged over depends on the parameters too. So k1 is no loss (``policy_gradient`` is the loss with
its advantage), and k3 is forward KL estimated from samples of the student, with an unbounded weight
``t / p`` on each span. All of this requires samples of ``p``: fresh, at temperature 1, without
top-p. Both are zero, with zero gradient, exactly where ``p(x) = t(x)``.
(losses: section 4.9, where the three gradients were found by enumeration.)
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from mopd_losses.core.loss import LossOutput
from mopd_losses.core.span_targets import SpanLoss, SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.sampled.sampled_spans import sampled_spans

#: Above this ``ln(t / p)``, k3 is continued by its tangent: e^89 overflows float32.
K3_LINE = 20.0


def k2(log_ratios: Float[Tensor, "*compared"]) -> Float[Tensor, "*compared"]:
    """``d^2 / 2``, in nats; its derivative is ``d``."""
    return log_ratios.square() / 2


def k3(log_ratios: Float[Tensor, "*compared"]) -> Float[Tensor, "*compared"]:
    """``e^-d - 1 + d``, in nats; its derivative is ``1 - e^-d``.

    Continued by its tangent below ``d = -20``, for a finite, non-zero gradient.
    """
    bounded = log_ratios.clamp_min(-K3_LINE)
    # relu has no gradient within the bound: two terms that cancel would lose the curve's own
    # gradient to rounding in float32.
    beyond = (-K3_LINE - log_ratios).relu()
    steepest = torch.expm1(torch.tensor(K3_LINE, dtype=log_ratios.dtype))
    return torch.expm1(-bounded) + bounded + beyond * steepest


class K2Loss(SpanLoss):
    """k2 on spans: a ``Loss``; needs scores at temperature 1.

    ``measured`` is documented at ``PolicyGradientLoss``.
    """

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``."""
        return _on_sampled_spans(k2, student, targets)


class K3Loss(SpanLoss):
    """k3 on spans: a ``Loss``; needs scores at temperature 1.

    ``measured`` is documented at ``PolicyGradientLoss``.
    """

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``."""
        return _on_sampled_spans(k3, student, targets)


def _on_sampled_spans(
    estimate: Callable[[Tensor], Tensor], student: StudentLogprobs, targets: SpanTargets
) -> LossOutput:
    spans = sampled_spans(student, targets)
    return LossOutput(
        student.zeros().index_add(0, spans.starts, estimate(spans.log_ratios)),
        spans.tokens,
        {"log_ratio": spans.log_ratios.detach(), "ruled_out": spans.ruled_out},
    )
