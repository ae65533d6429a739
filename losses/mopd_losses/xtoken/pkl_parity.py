"""P-KL exactly as in X-Token's code (NeMo-RL): for comparison, not for use.

With J the support shared by all rows of the micro-batch, q the student's probabilities through the
projection, and a span's student positions A and teacher rows B:

    Q(j) = mean over A of q(j)                     arithmetic
    Lambda(j) = mean over B of log softmax_J(u)(j) geometric, renormalised in J but not afterwards
    L(j) = log( Q(j) / (sum over J of Q + eps) + eps )             eps = 1e-10
    forward  sum over J of e^Lambda (Lambda - L)
    reverse  sum over J of e^L (L - Lambda)        both times the square of the temperature

Kept with its faults: in a span of several tokens it is not zero, and can be negative, where both
sides agree; a teacher id without a student id adds ``t log(t / eps)``, a constant of some 20 nats
times its mass; ids outside J have no influence. ``pooled_ctkd`` is the form without these faults.
X-Token divides by the spans of a micro-batch; here only the trainer divides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd_losses.alignment.span_members import span_means, span_members
from mopd_losses.config import Direction
from mopd_losses.core.compared_tokens import compared_spans
from mopd_losses.core.loss import AlignedPair, LossOutput
from mopd_losses.core.span_targets import span_targets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.projection.cache import DeviceProjection
from mopd_losses.projection.projected_logprobs import projected_logprobs
from mopd_losses.xtoken.support_targets import SupportTargets, topk_support

EPSILON = 1e-10
MOST_IDS = 8192


@dataclass(frozen=True, eq=False)
class PklParityLoss:
    """P-KL on the union of a micro-batch's top-k ids: a ``Loss``, at the first token of a span.

    ``measured``: ``student_mass`` on the support, a value a span.

    Args:
        most_ids: size limit of the support.
    """

    projection: DeviceProjection
    divergence: Direction = "forward_kl"
    temperature: float = 1.0
    most_ids: int = MOST_IDS

    def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> SupportTargets:
        """See ``Loss``."""
        teacher_size = len(self.projection.column_starts) - 1
        spans = span_targets(comparisons, offsets)
        return topk_support(spans, teacher_size, most_ids=self.most_ids)

    def __call__(self, student: StudentLogprobs, targets: SupportTargets) -> LossOutput:
        """See ``Loss``."""
        spans, positions = span_members(targets.student_starts, targets.student_ends)
        ids = targets.support.repeat(len(positions), 1)
        projected = projected_logprobs(
            student, positions, ids, self.projection, temperature=self.temperature
        ).exp()
        pooled = span_means(projected, spans, targets.student_ends - targets.student_starts)
        mass = pooled.sum(dim=1, keepdim=True)
        student_logs = (pooled / (mass + EPSILON) + EPSILON).log()
        teacher_logs = teacher_means(targets, student.dtype)
        first, second = teacher_logs, student_logs
        if self.divergence == "reverse_kl":
            first, second = second, first
        # Zero times minus infinity would be NaN.
        gaps = torch.where(torch.isneginf(first), 0.0, first - second)
        values = (first.exp() * gaps).sum(dim=1) * self.temperature**2
        per_token = student.zeros().index_add(0, targets.student_starts, values)
        compared = compared_spans(student, targets.student_starts, targets.student_ends)
        return LossOutput(per_token, compared, {"student_mass": mass.detach().squeeze(1)})


def teacher_means(targets: SupportTargets, dtype: torch.dtype) -> Tensor:
    """[spans, ids], Lambda: the mean of log-probabilities renormalised in the support."""
    spans, rows = span_members(targets.teacher_starts, targets.teacher_ends)
    renormalised = targets.logprobs[rows].to(dtype).log_softmax(dim=1)
    return span_means(renormalised, spans, targets.teacher_ends - targets.teacher_starts)
