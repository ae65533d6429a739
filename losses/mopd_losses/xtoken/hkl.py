"""H-KL: X-Token's hybrid of a KL on ids in common and a sorted distance on the others.

With a and b the geometric means of a span's student and teacher rows (means of log-probabilities
over the whole vocabulary, not renormalised), C the ids in common, U the others:

    KL  sum over C of e^b (b - a)                       forward; roles swapped for reverse
    L1  sum over r <= R of | (e^a on U)_(r) - (e^b on U)_(r) |      R = min(|U_S|, |U_T|, 8192)
    loss = (KL + L1) * temperature^2

The KL is of parts that do not sum to one, so where both models agree its gradient is not zero: it
takes mass from every student id that is not in common (the suppression for which X-Token's paper
blames GOLD-style training). ``generalised`` adds ``- sum of e^b + sum of e^a`` over C, which makes
it stationary at agreement, at no cost. It reads all student ids: for comparison,
not for large runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mopd_losses.alignment.span_members import span_means, span_members
from mopd_losses.config import Direction
from mopd_losses.core.compared_tokens import compared_spans
from mopd_losses.core.loss import AlignedPair, LossOutput
from mopd_losses.core.span_targets import span_targets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.divergences.divergences import forward_kl, reverse_kl
from mopd_losses.divergences.truncation import generalised_forward_kl, generalised_reverse_kl
from mopd_losses.projection.vocabulary_match import VocabularyMatch
from mopd_losses.xtoken.support_targets import SupportTargets, topk_support

XTokenForm = Literal["hkl", "pkl_parity"]

MOST_RANKS = 8192

#: With at least this share of the teacher's ids in common, X-Token compares ids by name.
LEAST_COVERAGE = 0.7


@dataclass(frozen=True, eq=False)
class HklLoss:
    """H-KL on the union of a micro-batch's top-k ids: a ``Loss``, at the first token of a span.

    Nats (KL) plus mass (L1). ``measured``, one value a span: ``matched`` in nats and ``unmatched``,
    both before the temperature's factor.
    """

    match: VocabularyMatch
    divergence: Direction = "forward_kl"
    generalised: bool = False
    temperature: float = 1.0
    most_ranks: int = MOST_RANKS

    def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> SupportTargets:
        """See ``Loss``."""
        return topk_support(span_targets(comparisons, offsets), self.match.teacher_size)

    def __call__(self, student: StudentLogprobs, targets: SupportTargets) -> LossOutput:
        """See ``Loss``."""
        spans, rows = span_members(targets.teacher_starts, targets.teacher_ends)
        teacher = span_means(
            targets.logprobs[rows].to(student.dtype),
            spans,
            targets.teacher_ends - targets.teacher_starts,
        )
        partners = self.match.student_of[targets.support]
        common = partners >= 0
        student_common = _mean_logprobs(student, targets, partners[common], self.temperature)
        teacher_common = teacher[:, common]
        possible = ~torch.isneginf(student_common) & ~torch.isneginf(teacher_common)
        matched = _kl(student_common, teacher_common, possible, self.divergence, self.generalised)
        (others,) = self.match.unmatched.nonzero(as_tuple=True)
        ranks = min(len(others), int((~common).sum()), self.most_ranks)
        masses = _mean_logprobs(student, targets, others, self.temperature).exp()
        teacher_masses = teacher[:, ~common].exp()
        gaps = masses.topk(ranks, dim=1).values - teacher_masses.topk(ranks, dim=1).values
        unmatched = gaps.abs().sum(dim=1)
        values = (matched + unmatched) * self.temperature**2
        per_token = student.zeros().index_add(0, targets.student_starts, values)
        compared = compared_spans(student, targets.student_starts, targets.student_ends)
        return LossOutput(
            per_token, compared, {"matched": matched.detach(), "unmatched": unmatched.detach()}
        )


def xtoken_form(match: VocabularyMatch, least_coverage: float = LEAST_COVERAGE) -> XTokenForm:
    """Return X-Token's choice: H-KL if enough of the vocabulary is in common, else P-KL.

    Args:
        match: by weight (``weighted_match``).
    """
    return "hkl" if match.coverage >= least_coverage else "pkl_parity"


def _mean_logprobs(
    student: StudentLogprobs, targets: SupportTargets, ids: Tensor, temperature: float
) -> Tensor:
    """[spans, ids], the mean over each span's positions of the student's log-probabilities."""
    spans, positions = span_members(targets.student_starts, targets.student_ends)
    logprobs = student.logprobs(
        positions.repeat_interleave(len(ids)), ids.repeat(len(positions)), temperature=temperature
    ).view(len(positions), len(ids))
    return span_means(logprobs, spans, targets.student_ends - targets.student_starts)


def _kl(
    student: Tensor, teacher: Tensor, possible: Tensor, divergence: Direction, generalised: bool
) -> Tensor:
    """[spans]; an id that either side rules out is not compared."""
    if generalised:
        kl = generalised_forward_kl if divergence == "forward_kl" else generalised_reverse_kl
        return kl(student, teacher, possible)
    student, teacher = (side.masked_fill(~possible, -torch.inf) for side in (student, teacher))
    return (forward_kl if divergence == "forward_kl" else reverse_kl)(student, teacher)
