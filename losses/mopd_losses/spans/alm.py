"""ALM: both sides should find the same text equally likely (arXiv 2503.20083).

For a span, with surprisals ``alpha = -sum of ln t(y)`` over the teacher's tokens and
``beta = -sum of ln p(x)`` over the student's, compared as the binary events "this text follows" of
probability ``a = e^(-alpha / tau)`` and ``b = e^(-beta / tau)``:

    KL    a ln(a / b) + (1 - a) ln((1 - a) / (1 - b))      times tau, tau -> inf:
          beta - alpha + alpha ln(alpha / beta)            by beta: 1 - alpha / beta
    TVD   2 |a - b|                                        times tau, tau -> inf: 2 |alpha - beta|

It reads one probability a token, so a teacher's top-k is not needed at all, and it says something
about every slot of a span, where CTKD looks at the first: a companion to it. A large finite
``tau`` makes the value (and its gradient) smaller by ``tau``; the limit has that factor taken out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.loss_output import LossOutput
from mopd_losses.core.span_targets import SpanTargets, span_targets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.spans.span_likelihood import student_span_logprobs, teacher_span_logprobs

BinaryDivergence = Literal["kl", "tvd"]

#: Surprisals are held above this, in nats: a teacher that is certain leaves no ratio to take.
SURPRISAL_FLOOR = 1e-4


@dataclass(frozen=True, eq=False)
class AlmLoss:
    """``alm`` with its settings: a ``Loss``."""

    divergence: BinaryDivergence = "kl"
    tau: float | None = None

    def targets(
        self, comparisons: Sequence[AlignedPair], slot_offsets: Sequence[int]
    ) -> SpanTargets:
        """See ``Loss``."""
        return span_targets(comparisons, slot_offsets)

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``."""
        return alm(student, targets, divergence=self.divergence, tau=self.tau)


def alm(
    student: StudentLogprobs,
    targets: SpanTargets,
    *,
    divergence: BinaryDivergence = "kl",
    tau: float | None = None,
) -> LossOutput:
    """Nats per student token; a span's value stands at the span's first token.

    A span that either side rules out altogether is not compared.

    Args:
        tau: flattens both likelihoods before they are compared; ``None`` for the limit.

    Returns:
        ``measured``: ``student_surprisal`` and ``teacher_surprisal`` of each compared span, nats.
    """
    likelihood = student_span_logprobs(student, targets)
    teacher_likelihood = teacher_span_logprobs(targets, student.dtype)
    compared = ~torch.isneginf(likelihood) & ~torch.isneginf(teacher_likelihood)
    # Masked before any arithmetic: infinity less infinity has no gradient to mask afterwards.
    beta = torch.where(compared, -likelihood, 1.0).clamp_min(SURPRISAL_FLOOR)
    alpha = torch.where(compared, -teacher_likelihood, 1.0).clamp_min(SURPRISAL_FLOOR)
    values = (
        _in_the_limit(alpha, beta, divergence) if tau is None else _at(tau, alpha, beta, divergence)
    )
    per_token = student.zeros().index_add(
        0, targets.student_starts, torch.where(compared, values, 0.0)
    )
    measured = {
        "student_surprisal": beta.detach()[compared],
        "teacher_surprisal": alpha[compared],
    }
    return LossOutput(per_token, measured)


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
