"""ULD: distributions over unrelated vocabularies, compared by their sorted masses.

    sum over ranks r <= R of |p_(r) - t_(r)| + |rest of p - rest of t|

the cheapest transport of one set of probabilities to the other if every move costs the same (arXiv
2402.12030). R is the number of entries that the teacher sent, and everything below is one bin on
either side: exact for a full vocabulary, and otherwise too small by at most the two rests together.
Spans of several tokens are merged first (``merged_spans``).

A mass, not nats. ULD never reads *which* token is likely: a baseline.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from mopd_losses.config import Merge
from mopd_losses.core.compared_tokens import compared_spans
from mopd_losses.core.loss import AlignedPair, LossOutput
from mopd_losses.core.span_targets import SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.spans.merged_spans import MergedSpans, mergeable_targets, merged_spans


@dataclass(frozen=True, eq=False)
class UldLoss:
    """ULD: a ``Loss`` in mass, with a span's distance at the first position that it reads.

    ``measured``: ``teacher_rest`` of each span, the merged mass in the teacher's last bin.
    """

    real_ids: Bool[Tensor, "student_width"]
    merge: Merge = "bayesian"

    def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> SpanTargets:
        """See ``Loss``."""
        return mergeable_targets(comparisons, offsets, self.merge)

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``."""
        merged = merged_spans(student, targets, self.merge)
        teacher = targets.topk_logprobs[merged.rows].to(student.dtype)
        tail = targets.tail_logprobs[merged.rows].to(student.dtype)
        distances = sorted_distance(student, merged, teacher, tail.exp(), self.real_ids, None)
        per_token = student.zeros().index_add(0, targets.student_starts, distances)
        compared = compared_spans(student, targets.student_starts, targets.student_ends)
        return LossOutput(
            per_token, compared, {"teacher_rest": (tail + merged.teacher_log_factors).exp()}
        )


def sorted_distance(
    student: StudentLogprobs,
    merged: MergedSpans,
    teacher: Tensor,
    teacher_rest: Tensor,
    allowed: Tensor,
    student_elsewhere: Tensor | None,
) -> Tensor:
    """[spans], the L1 distance of merged masses rank by rank, and of the rests.

    Args:
        teacher: [spans, k], log-probabilities of the kept rows; ``-inf`` where not compared.
        teacher_rest: [spans], mass of the kept row outside its entries.
        allowed: bool [width], the student ids that are ranked.
        student_elsewhere: [spans], the student's mass that is compared by name.
    """
    ranked = teacher.sort(dim=1, descending=True).values.exp()
    ids = student.most_likely_ids(merged.positions, allowed, teacher.shape[1])
    positions = merged.positions.repeat_interleave(ids.shape[1])
    logprobs = student.logprobs(positions, ids.clamp_min(0).flatten()).view(ids.shape)
    # As many ranks as the teacher has entries; lower ranks of the student are in the rest.
    entries = torch.isfinite(teacher).sum(dim=1, keepdim=True)
    ranks = torch.arange(ids.shape[1], device=ids.device)
    masses = torch.where((ids >= 0) & (ranks < entries), logprobs.exp(), 0.0)
    rest = 1 - masses.sum(dim=1)
    if student_elsewhere is not None:
        rest = rest - student_elsewhere
    masses = torch.nn.functional.pad(masses, (0, teacher.shape[1] - masses.shape[1]))
    factors = merged.log_factors.exp()[:, None]
    teacher_factors = merged.teacher_log_factors.exp()[:, None]
    student_bins = torch.cat([masses, rest[:, None]], dim=1) * factors
    teacher_bins = torch.cat([ranked, teacher_rest[:, None]], dim=1) * teacher_factors
    return (student_bins - teacher_bins).abs().sum(dim=1)
