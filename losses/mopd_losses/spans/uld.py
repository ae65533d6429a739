"""ULD: two distributions with nothing in common are compared by the shape of their sorted masses.

    sum over ranks r <= R of |p_(r) - t_(r)| + |rest of p - rest of t|

the cheapest way of moving one set of probabilities onto the other where every move costs the same
(arXiv 2402.12030). R is the number of entries that the teacher sent, and everything below is one
bin on either side: exact where the teacher sent its whole vocabulary, and otherwise too small by at
most the two rests together. Spans of several tokens are merged first (``merged_spans``).

A mass, not nats. It never looks at *which* token is likely: a baseline.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from mopd_losses.config import Merge
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.loss_output import LossOutput
from mopd_losses.core.span_targets import SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.spans.merged_spans import MergedSpans, mergeable_targets, merged_spans


@dataclass(frozen=True, eq=False)
class UldLoss:
    """``uld`` with its settings: a ``Loss``."""

    real_ids: Bool[Tensor, "student_width"]
    merge: Merge = "bayesian"

    def targets(
        self, comparisons: Sequence[AlignedPair], slot_offsets: Sequence[int]
    ) -> SpanTargets:
        """See ``Loss``."""
        return mergeable_targets(comparisons, slot_offsets, self.merge)

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``."""
        return uld(student, targets, self.real_ids, merge=self.merge)


def uld(
    student: StudentLogprobs, targets: SpanTargets, real_ids: Tensor, *, merge: Merge = "bayesian"
) -> LossOutput:
    """Mass per student token; a span's distance stands at the first slot that the span reads.

    Args:
        targets: from ``mergeable_targets`` for the same ``merge``.
        real_ids: bool [student width], the ids that take part.

    Returns:
        ``measured``: ``teacher_rest`` of each span, the merged mass in the teacher's last bin.
    """
    merged = merged_spans(student, targets, merge)
    teacher = targets.topk_logprobs[merged.rows].to(student.dtype)
    tail = targets.tail_logprobs[merged.rows].to(student.dtype)
    distances = sorted_distance(student, merged, teacher, tail.exp(), real_ids, None)
    per_token = student.zeros().index_add(0, targets.student_starts, distances)
    return LossOutput(per_token, {"teacher_rest": (tail + merged.teacher_log_factors).exp()})


def sorted_distance(
    student: StudentLogprobs,
    merged: MergedSpans,
    teacher: Tensor,
    teacher_rest: Tensor,
    allowed: Tensor,
    student_elsewhere: Tensor | None,
) -> Tensor:
    """[spans], the L1 distance of merged masses rank by rank, and of what is left.

    Args:
        teacher: [spans, k], log-probabilities of the kept rows; ``-inf`` where nothing is compared.
        teacher_rest: [spans], the kept row's mass that is in no entry.
        allowed: bool [width], the student's ids that are ranked.
        student_elsewhere: [spans], the student's mass that is compared by other means.
    """
    ranked = teacher.sort(dim=1, descending=True).values.exp()
    ids = student.most_likely_ids(merged.slots, allowed, teacher.shape[1])
    slots = merged.slots.repeat_interleave(ids.shape[1])
    read = student.logprobs(slots, ids.clamp_min(0).flatten()).view(ids.shape)
    # As many as the teacher has entries here; the student's next ones meet the teacher's rest.
    entries = torch.isfinite(teacher).sum(dim=1, keepdim=True)
    ranks = torch.arange(ids.shape[1], device=ids.device)
    masses = torch.where((ids >= 0) & (ranks < entries), read.exp(), 0.0)
    rest = 1 - masses.sum(dim=1)
    if student_elsewhere is not None:
        rest = rest - student_elsewhere
    masses = torch.nn.functional.pad(masses, (0, teacher.shape[1] - masses.shape[1]))
    factors = merged.log_factors.exp()[:, None]
    teacher_factors = merged.teacher_log_factors.exp()[:, None]
    ours = torch.cat([masses, rest[:, None]], dim=1) * factors
    theirs = torch.cat([ranked, teacher_rest[:, None]], dim=1) * teacher_factors
    return (ours - theirs).abs().sum(dim=1)
