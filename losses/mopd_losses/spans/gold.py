"""GOLD: ids that both vocabularies have are compared by name, all others by rank (TRL's GOLD).

For every span, its rows merged into one vector on either side (``merged_spans``), P and T:

    matched    generalised JSD_beta of P and T on ids in common, neither renormalised
    unmatched  sorted L1 distance of P and T on all other ids (``uld``)
    loss       w_m * matched + w_u * unmatched        TRL: w_m = ids in common / teacher ids

A teacher that sends its top-k is compared with on what it sent: ids in common that are among its k,
ranks of its other entries, and one bin a side for all that remains, matched or not. With all
entries this is the published loss; otherwise unmatched and rest differ from it by at most the two
rests together. Of merged spans with several tokens only ranks and the realised token are strictly
comparable: the vectors live on the ids of the two sides' *last* tokens.

JSD of unnormalised vectors is stationary where they agree for 0 < beta < 1, but at 0 and 1 it is a
plain KL of parts, which also pushes mass out of the ids not in common (losses.md section 1.7).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mopd_losses.config import Merge
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.loss_output import LossOutput
from mopd_losses.core.span_targets import SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.divergences.divergences import jensen_shannon
from mopd_losses.projection.vocabulary_match import VocabularyMatch
from mopd_losses.spans.merged_spans import mergeable_targets, merged_spans
from mopd_losses.spans.uld import sorted_distance


@dataclass(frozen=True, eq=False)
class GoldLoss:
    """``gold`` with its settings: a ``Loss``."""

    match: VocabularyMatch
    matched_weight: float
    unmatched_weight: float
    beta: float = 0.5
    merge: Merge = "bayesian"

    def targets(
        self, comparisons: Sequence[AlignedPair], slot_offsets: Sequence[int]
    ) -> SpanTargets:
        """See ``Loss``."""
        return mergeable_targets(comparisons, slot_offsets, self.merge)

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``."""
        return gold(
            student,
            targets,
            self.match,
            matched_weight=self.matched_weight,
            unmatched_weight=self.unmatched_weight,
            beta=self.beta,
            merge=self.merge,
        )


def adaptive_weights(
    match: VocabularyMatch, teacher_width: int | None = None
) -> tuple[float, float]:
    """TRL's weights of matched and unmatched: ids in common as a share of the teacher's, the rest.

    Args:
        teacher_width: rows of the teacher's head, which TRL divides by; none for its ids, so that
            padding counts for nothing.
    """
    share = match.pairs / max(match.teacher_size if teacher_width is None else teacher_width, 1)
    return share, 1 - share


def gold(
    student: StudentLogprobs,
    targets: SpanTargets,
    match: VocabularyMatch,
    *,
    matched_weight: float,
    unmatched_weight: float,
    beta: float = 0.5,
    merge: Merge = "bayesian",
) -> LossOutput:
    """Nats (matched) and mass (unmatched) per student token, at the first slot that a span reads.

    Args:
        targets: from ``mergeable_targets`` for the same ``merge``.
        beta: the teacher's share of the mixture; 0 is KL(T || P) and 1 KL(P || T), unscaled.

    Returns:
        ``measured``, one value a span: ``matched`` in nats and ``unmatched``, both unweighted, and
        ``teacher_matched_mass`` and ``student_matched_mass`` of the merged vectors.
    """
    merged = merged_spans(student, targets, merge)
    ids = targets.topk_ids[merged.rows]
    teacher = targets.topk_logprobs[merged.rows].to(student.dtype)
    partners = match.student_of[ids.clamp_min(0)]
    slots = merged.slots.repeat_interleave(ids.shape[1])
    read = student.logprobs(slots, partners.clamp_min(0).flatten()).view(ids.shape)
    in_common = (ids >= 0) & (partners >= 0) & ~torch.isneginf(teacher) & ~torch.isneginf(read)
    ours = torch.where(in_common, read, -torch.inf)
    theirs = torch.where(in_common, teacher, -torch.inf)
    matched = jensen_shannon(
        ours + merged.log_factors[:, None],
        theirs + merged.teacher_log_factors[:, None],
        teacher_weight=beta,
    )
    impossible = (partners >= 0) & ~in_common  # of the student: like an entry that was not sent
    unnamed = teacher.masked_fill((ids < 0) | (partners >= 0), -torch.inf)
    tail = targets.tail_logprobs[merged.rows].to(student.dtype).exp()
    tail = tail + teacher.masked_fill(~impossible | (ids < 0), -torch.inf).exp().sum(dim=1)
    unmatched = sorted_distance(
        student, merged, unnamed, tail, match.unmatched, ours.exp().sum(dim=1)
    )
    values = matched_weight * matched + unmatched_weight * unmatched
    per_token = student.zeros().index_add(0, targets.student_starts, values)
    factor = merged.log_factors.detach().exp()
    measured = {
        "matched": matched.detach(),
        "unmatched": unmatched.detach(),
        "teacher_matched_mass": theirs.exp().sum(dim=1) * merged.teacher_log_factors.exp(),
        "student_matched_mass": ours.detach().exp().sum(dim=1) * factor,
    }
    return LossOutput(per_token, measured)
