"""Policy-gradient distillation: the teacher's log-probability of the sampled text as advantage.

For the text ``x`` of a span (where tokens align one to one, of a token), drawn from ``mu`` (the
student at sampling time, with temperature and top-p), the current student ``p`` and the teacher
``t``:

    m(x) = skew * sg(p(x)) + (1 - skew) * t(x)          the teacher, or a proximal one
    d    = ln p(x) - ln m(x)                            the k1 estimate; the advantage is -d
    rho  = min(p(x) / mu(x), max_ratio)                 importance correction
    b    = 0, or the mean of d on (top-k, rest)         baseline; the value does not contain it
    loss = sg(rho * d) + sg(rho * (d - b)) * (p(x) / sg(p(x)) - 1)
                                                        gradient: rho * (d - b) * grad ln p(x)

``sg`` is stop-gradient. Where the ratio is not clipped the expected gradient over ``x ~ mu`` is
exactly that of the position's reverse KL to ``m``, for any ``mu`` with the support of ``p`` (not
top-p below 1). ``grad ln p(x)`` has mean zero under ``p``: a baseline that does not depend on ``x``
changes no expected gradient, and the plain gradient of ``d`` (k1 as a loss) has mean zero. Only the
tokens of a span get credit, none before it.
(losses: section 4.9; Thinking Machines' on-policy distillation, slime, prime-rl.)

**Proximal teacher.** A text that the teacher rules out has a ``d`` without a bound, and one such
sample outweighs all others of a step. Mixed with the student, ``d`` is at most ``-ln skew``; as the
student approaches the teacher, so does ``m``, and the optimum is the same. (arXiv 2607.04751, whose
alpha is ``1 - skew``.)

The baseline is a mean of ``d`` over the entries of the top-k and one for all other tokens. With the
weights ``p`` it is the reverse KL (arXiv 2605.07865). Here they are ``p(x) |grad ln p(x)|^2``, with
``|grad ln p(x)|^2 = 1 - 2 p(x) + sum of p^2`` by the logits: of all baselines, the one with the
least variance of the gradient by the logits. (The reverse KL may raise it: a token of probability
0.99 hardly moves the logits.) Only for distributions of one tokenizer: among others, the tokens
that align one to one are a part of all that could have been drawn, over which the mean of
``grad ln p(x)`` is not zero.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mopd_losses.core.loss import LossOutput
from mopd_losses.core.span_targets import SpanLoss, SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.divergences.divergences import log_mixture
from mopd_losses.divergences.truncation import floored_tail, with_tail_bucket
from mopd_losses.sampled.sampled_spans import SampledSpans, sampled_spans


@dataclass(frozen=True, eq=False)
class PolicyGradientLoss(SpanLoss):
    """The importance-weighted log-ratio with a policy gradient: a ``Loss``, with a span's value at
    its first position.

    The mean over samples estimates reverse KL, so the value of one span may be negative. Needs
    scores at temperature 1. ``measured``: ``log_ratio`` (d without a mixture), ``importance_ratio``
    before clipping and ``clipped`` (0 or 1) for each compared span, and ``ruled_out`` (0 or 1) for
    each span.

    Args:
        max_ratio: upper limit of ``p / mu``. A clipped span keeps its direction, with less weight.
        has_baseline: subtract ``b``; for a teacher with the student's tokenizer.
        skew: the student's share of the proximal teacher, from 0 to below 1.
    """

    max_ratio: float = 2.0
    has_baseline: bool = False
    skew: float = 0.0

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``."""
        spans = sampled_spans(student, targets)
        current = spans.student.detach()
        log_ratios = current - _proximal(current, spans.teacher, self.skew)
        ratios = (current - spans.sampled).exp()
        weights = ratios.clamp_max(self.max_ratio)
        excesses = log_ratios
        if self.has_baseline:
            excesses = log_ratios - _baseline(student, targets, spans, self.skew)
        # e^(x - sg(x)) - 1 is zero, and its gradient is that of x.
        values = weights * (log_ratios + excesses * torch.expm1(spans.student - current))
        return LossOutput(
            student.zeros().index_add(0, spans.starts, values),
            spans.tokens,
            {
                "log_ratio": spans.log_ratios.detach(),
                "importance_ratio": ratios,
                "clipped": (ratios > self.max_ratio).to(ratios.dtype),
                "ruled_out": spans.ruled_out,
            },
        )


@torch.no_grad()
def _baseline(
    student: StudentLogprobs, targets: SpanTargets, spans: SampledSpans, skew: float
) -> Float[Tensor, "compared"]:
    ids = targets.topk_ids[spans.rows]
    positions = spans.starts.repeat_interleave(ids.shape[1])
    own = student.logprobs(positions, ids.clamp_min(0).flatten()).view(ids.shape)
    entries = targets.topk_logprobs[spans.rows].to(student.dtype)
    tails = targets.tail_logprobs[spans.rows].to(student.dtype)
    return mean_log_ratios(own, entries, tails, skew)


def mean_log_ratios(
    student: Float[Tensor, "compared k"],
    teacher: Float[Tensor, "compared k"],
    teacher_tail: Float[Tensor, "compared"],
    skew: float = 0.0,
) -> Float[Tensor, "compared"]:
    """[compared], the mean of ``d`` with the least variance of the gradient by the logits; nats.

    All tokens outside the top-k are one entry, with a floor under the teacher's mass
    (``floored_tail``) and the weight of many unlikely tokens.

    Args:
        student: log-probabilities of the teacher's ids.
        teacher: log-probabilities, ``-inf`` where missing.
        teacher_tail: log of the mass outside the ids.
        skew: see ``PolicyGradientLoss``.
    """
    retained = ~torch.isneginf(teacher) & ~torch.isneginf(student)
    student, teacher = with_tail_bucket(student, teacher, teacher_tail, retained)
    teacher = _proximal(student, floored_tail(student, teacher), skew)
    p = student.exp()
    entries = p[:, :-1]
    squared_norms = 1 + entries.square().sum(dim=1, keepdim=True)
    weights = p * torch.cat([squared_norms - 2 * entries, squared_norms], dim=1)
    log_ratios = (student - teacher).masked_fill(p == 0, 0.0)
    return (weights * log_ratios).sum(dim=1) / weights.sum(dim=1)


def _proximal(student: Tensor, teacher: Tensor, skew: float) -> Tensor:
    """``ln(skew * p + (1 - skew) * t)``, elementwise."""
    return teacher if skew == 0 else log_mixture(student, teacher, skew)
