"""ALM: equal likelihood of the same text on both sides (arXiv 2503.20083).

For a span, with surprisals ``alpha = -sum of ln t(y)`` over the teacher's tokens and
``beta = -sum of ln p(x)`` over the student's, compared as the binary events "this text follows" of
probability ``a = e^(-alpha / tau)`` and ``b = e^(-beta / tau)``:

    KL    a ln(a / b) + (1 - a) ln((1 - a) / (1 - b))      times tau, tau -> inf:
          beta - alpha + alpha ln(alpha / beta)            by beta: 1 - alpha / beta
    TVD   2 |a - b|                                        times tau, tau -> inf: 2 |alpha - beta|

ALM reads one probability a token, so no top-k of the teacher is needed, and it trains every
position of a span, where CTKD reads the first: a companion to CTKD. A large finite ``tau`` divides
the value (and its gradient) by ``tau``; the limit has that factor taken out.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mopd_losses.core.compared_tokens import compared_spans
from mopd_losses.core.loss import LossOutput
from mopd_losses.core.span_targets import SpanLoss, SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.spans.span_likelihood import student_span_logprobs, teacher_span_logprobs

BinaryDivergence = Literal["kl", "tvd"]

#: Lower limit of surprisals, in nats: a certain teacher would have a ratio of 0 / 0.
SURPRISAL_FLOOR = 1e-4


@dataclass(frozen=True, eq=False)
class AlmLoss(SpanLoss):
    """ALM: a ``Loss``, with a span's value at its first position.

    Spans with a token that either side rules out are not compared. ``measured``:
    ``student_surprisal`` and ``teacher_surprisal`` of each compared span, nats.

    Args:
        tau: flattens both likelihoods before they are compared; ``None`` for the limit.
    """

    divergence: BinaryDivergence = "kl"
    tau: float | None = None

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``."""
        likelihood = student_span_logprobs(student, targets)
        teacher_likelihood = teacher_span_logprobs(targets, student.dtype)
        compared = ~torch.isneginf(likelihood) & ~torch.isneginf(teacher_likelihood)
        # Masked before any arithmetic: infinity minus infinity has a NaN gradient.
        beta = torch.where(compared, -likelihood, 1.0).clamp_min(SURPRISAL_FLOOR)
        alpha = torch.where(compared, -teacher_likelihood, 1.0).clamp_min(SURPRISAL_FLOOR)
        values = (
            _in_the_limit(alpha, beta, self.divergence)
            if self.tau is None
            else _at(self.tau, alpha, beta, self.divergence)
        )
        per_token = student.zeros().index_add(
            0, targets.student_starts, torch.where(compared, values, 0.0)
        )
        measured = {
            "student_surprisal": beta.detach()[compared],
            "teacher_surprisal": alpha[compared],
        }
        tokens = compared_spans(student, targets.student_starts, targets.student_ends, compared)
        return LossOutput(per_token, tokens, measured)


def _in_the_limit(alpha: Tensor, beta: Tensor, divergence: BinaryDivergence) -> Tensor:
    if divergence == "tvd":
        return 2 * (alpha - beta).abs()
    return beta - alpha + alpha * (alpha / beta).log()


def _at(tau: float, alpha: Tensor, beta: Tensor, divergence: BinaryDivergence) -> Tensor:
    log_a, log_b = -alpha / tau, -beta / tau
    if divergence == "tvd":
        return 2 * (torch.expm1(log_a) - torch.expm1(log_b)).abs()
    not_a, not_b = -torch.expm1(log_a), -torch.expm1(log_b)
    return log_a.exp() * (log_a - log_b) + not_a * (not_a / not_b).log()
