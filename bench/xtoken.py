"""P-KL exactly as in X-Token's code (NeMo-RL), for comparison: ``bench.numerals``.

With J the support shared by all rows of the micro-batch, q the student's probabilities through the
projection, and a span's student positions A and teacher rows B:

    Q(j) = mean over A of q(j)                     arithmetic
    Lambda(j) = mean over B of log softmax_J(u)(j) geometric, renormalised in J but not afterwards
    L(j) = log( Q(j) / (sum over J of Q + eps) + eps )             eps = 1e-10
    forward  sum over J of e^Lambda (Lambda - L)
    reverse  sum over J of e^L (L - Lambda)        both times the square of the temperature

Kept with its faults: in a span of several tokens it is not zero, and can be negative, where both
sides agree; a teacher id without a student id adds ``t log(t / eps)``, a constant of some 20 nats
times its mass; ids outside J have no influence; unrelated rows share a support, so that the split
of a step into micro-batches changes the loss. ``ctkd`` with ``span_rows: pooled`` is the form
without these faults. X-Token divides by the spans of a micro-batch; here the trainer divides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd_losses import AlignedPair, DeviceProjection, LossOutput
from mopd_losses.alignment.span_members import span_members, span_sums
from mopd_losses.config import Direction
from mopd_losses.core.compared_tokens import compared_spans
from mopd_losses.core.span_targets import SpanTargets, span_targets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.core.targets import RowTargets
from mopd_losses.projection.projected_logprobs import projected_logprobs

EPSILON = 1e-10
MOST_IDS = 8192


@dataclass(frozen=True, eq=False)
class SupportTargets(RowTargets):
    """Spans, and the teacher's rows on the support."""

    student_starts: Tensor  # int64 [spans], positions
    student_ends: Tensor  # exclusive
    teacher_starts: Tensor  # int64 [spans], rows
    teacher_ends: Tensor  # exclusive
    support: Tensor  # int64 [ids], increasing
    logprobs: Tensor  # [rows, ids], nats, over the teacher's full vocabulary

    @property
    def shared(self) -> tuple[str, ...]:
        """The support and the teacher's rows; spans contain row numbers."""
        return ("support", "logprobs")


def topk_support(
    spans: SpanTargets, teacher_size: int, *, most_ids: int = MOST_IDS
) -> SupportTargets:
    """Build targets on the union of all rows' top-k ids, or on the most likely ids of any row.

    Each id that a row did not send gets an equal share of that row's tail.

    Args:
        teacher_size: the teacher's ids, for the number that share a tail.
        most_ids: the largest support.
    """
    present = spans.topk_ids >= 0
    support, entry = spans.topk_ids[present].unique(return_inverse=True)
    column = torch.arange(len(support), device=support.device)
    if most_ids < len(support):
        peaks = spans.topk_logprobs.new_full((len(support),), -torch.inf)
        peaks = peaks.scatter_reduce(0, entry, spans.topk_logprobs[present], "amax")
        chosen = peaks.topk(most_ids).indices.sort().values
        column = torch.full_like(column, -1)
        column[chosen] = torch.arange(most_ids, device=support.device)
        support = support[chosen]
    unsent = (teacher_size - present.sum(dim=1)).clamp_min(1).to(spans.tail_logprobs.dtype)
    share = (spans.tail_logprobs - unsent.log()).clamp_min(math.log(EPSILON))
    logprobs = share[:, None].repeat(1, len(support))
    kept = column[entry] >= 0
    rows = present.nonzero(as_tuple=True)[0][kept]
    logprobs[rows, column[entry][kept]] = spans.topk_logprobs[present][kept]
    return SupportTargets(
        student_starts=spans.student_starts,
        student_ends=spans.student_ends,
        teacher_starts=spans.teacher_starts,
        teacher_ends=spans.teacher_ends,
        support=support,
        logprobs=logprobs,
    )


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
        pooled = _means(projected, spans, targets.student_ends - targets.student_starts)
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
    return _means(renormalised, spans, targets.teacher_ends - targets.teacher_starts)


def _means(values: Tensor, spans: Tensor, lengths: Tensor) -> Tensor:
    """[spans, ids], the mean over each span's members [members, ids]; of logs, a geometric one."""
    return span_sums(values, spans, len(lengths)) / lengths[:, None].to(values.dtype)
