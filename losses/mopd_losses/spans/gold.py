"""GOLD: ids in both vocabularies are compared by name, all other ids by rank (TRL's GOLD).

For every span, its rows merged into one vector on either side (``merged_spans``), P and T:

    matched    generalised JSD_beta of P and T on ids in common, neither renormalised
    unmatched  sorted L1 distance of P and T on all other ids (``uld``)
    loss       w_m * matched + w_u * unmatched        TRL: w_m = ids in common / teacher ids

With a teacher's top-k, three parts are compared: ids in common among its k, ranks of its other
entries, and one bin a side for all that remains, matched or not. With all entries this is the
published loss; otherwise unmatched and rest differ from it by at most the two rests together. Of
merged spans with several tokens only ranks and the realised token are strictly comparable: the
vectors are over the ids of the two sides' *last* tokens.

JSD of unnormalised vectors is stationary where they agree for 0 < beta < 1, but at 0 and 1 it is a
plain KL of parts, which also pushes mass out of the ids not in common (losses.md section 1.7).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mopd_losses.config import Merge
from mopd_losses.core.compared_tokens import compared_spans
from mopd_losses.core.loss import AlignedPair, LossOutput
from mopd_losses.core.span_targets import SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.divergences.divergences import jensen_shannon
from mopd_losses.projection.vocabulary_match import VocabularyMatch
from mopd_losses.spans.merged_spans import mergeable_targets, merged_spans
from mopd_losses.spans.uld import sorted_distance


@dataclass(frozen=True, eq=False)
class GoldLoss:
    """GOLD: a ``Loss`` in nats (matched) plus mass (unmatched), at the first position of a span.

    ``measured``, one value a span: ``matched`` in nats and ``unmatched``, both unweighted, and
    ``teacher_matched_mass`` and ``student_matched_mass`` of the merged vectors.

    Args:
        beta: the teacher's share of the mixture; 0 is KL(T || P) and 1 KL(P || T), unscaled.
    """

    match: VocabularyMatch
    matched_weight: float
    unmatched_weight: float
    beta: float = 0.5
    merge: Merge = "bayesian"

    def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> SpanTargets:
        """See ``Loss``."""
        return mergeable_targets(comparisons, offsets, self.merge)

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``."""
        merged = merged_spans(student, targets, self.merge)
        ids = targets.topk_ids[merged.rows]
        teacher = targets.topk_logprobs[merged.rows].to(student.dtype)
        partners = self.match.student_of[ids.clamp_min(0)]
        positions = merged.positions.repeat_interleave(ids.shape[1])
        logprobs = student.logprobs(positions, partners.clamp_min(0).flatten()).view(ids.shape)
        in_common = (
            (ids >= 0) & (partners >= 0) & ~torch.isneginf(teacher) & ~torch.isneginf(logprobs)
        )
        common = torch.where(in_common, logprobs, -torch.inf)
        teacher_common = torch.where(in_common, teacher, -torch.inf)
        matched = jensen_shannon(
            common + merged.log_factors[:, None],
            teacher_common + merged.teacher_log_factors[:, None],
            teacher_weight=self.beta,
        )
        impossible = (partners >= 0) & ~in_common  # for the student: as if not sent
        unnamed = teacher.masked_fill((ids < 0) | (partners >= 0), -torch.inf)
        tail = targets.tail_logprobs[merged.rows].to(student.dtype).exp()
        tail = tail + teacher.masked_fill(~impossible | (ids < 0), -torch.inf).exp().sum(dim=1)
        unmatched = sorted_distance(
            student, merged, unnamed, tail, self.match.unmatched, common.exp().sum(dim=1)
        )
        values = self.matched_weight * matched + self.unmatched_weight * unmatched
        per_token = student.zeros().index_add(0, targets.student_starts, values)
        factor = merged.log_factors.detach().exp()
        measured = {
            "matched": matched.detach(),
            "unmatched": unmatched.detach(),
            "teacher_matched_mass": teacher_common.exp().sum(dim=1)
            * merged.teacher_log_factors.exp(),
            "student_matched_mass": common.detach().exp().sum(dim=1) * factor,
        }
        compared = compared_spans(student, targets.student_starts, targets.student_ends)
        return LossOutput(per_token, compared, measured)


def adaptive_weights(
    match: VocabularyMatch, teacher_width: int | None = None
) -> tuple[float, float]:
    """Return TRL's weights of matched and unmatched: the share of teacher ids in common, the rest.

    Args:
        teacher_width: rows of the teacher's head, which TRL divides by; None for the teacher's
            number of ids, so that padding does not count.
    """
    share = match.pairs / max(match.teacher_size if teacher_width is None else teacher_width, 1)
    return share, 1 - share
