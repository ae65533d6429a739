"""SimCT, corrected: atoms for the first token in common, for the complete span, and for the rest.

Where two tokenizers cut a span differently, their first tokens are hardly comparable, but the span
is one event on either side. For each span the two models are compared on

    an atom for each id in common that the teacher retained at the span's first row,
        but not for either side's first token of the span, which contains the span's event
    an atom for the span: the product of its tokens' probabilities
    an atom for the rest

which are disjoint and sum to one on both sides, so any divergence on them is a lower bound of the
one between sequences. A span of one token on either side is plain top-k KL with a tail bucket.

(SimCT, arXiv 2605.07711, in KDFlow, where a span's coordinate is the mean of raw logits, which
depends on a constant that no model's output depends on, and overlaps its first token.)
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mopd_losses.config import Direction
from mopd_losses.core.compared_tokens import compared_spans
from mopd_losses.core.loss import LossOutput
from mopd_losses.core.span_targets import SpanLoss, SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.divergences.truncation import student_tail, tail_forward_kl, tail_reverse_kl
from mopd_losses.projection.vocabulary_match import VocabularyMatch
from mopd_losses.spans.span_likelihood import student_span_logprobs, teacher_span_logprobs

_DIVERGENCES = {"forward_kl": tail_forward_kl, "reverse_kl": tail_reverse_kl}


@dataclass(frozen=True, eq=False)
class SimctLoss(SpanLoss):
    """SimCT: a ``Loss``, with a span's divergence at its first position.

    ``measured``, one value a span: ``teacher_mass`` and ``student_mass`` outside the rest, and
    ``teacher_span_mass`` and ``student_span_mass`` of the span's atom.
    """

    match: VocabularyMatch
    divergence: Direction = "reverse_kl"

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``."""
        atoms = span_atoms(student, targets, self.match)
        values = _DIVERGENCES[self.divergence](
            atoms.student, atoms.teacher, atoms.teacher_rest, atoms.retained
        )
        per_token = student.zeros().index_add(0, targets.student_starts, values)
        with torch.no_grad():
            span = atoms.retained[:, -1]
            measured = {
                "teacher_mass": -torch.expm1(atoms.teacher_rest.clamp_max(0)),
                "student_mass": -torch.expm1(student_tail(atoms.student, atoms.retained)),
                "teacher_span_mass": torch.where(span, atoms.teacher[:, -1].exp(), 0.0),
                "student_span_mass": torch.where(span, atoms.student[:, -1].exp(), 0.0),
            }
        compared = compared_spans(
            student, targets.student_starts, targets.student_ends, atoms.retained.any(dim=1)
        )
        return LossOutput(per_token, compared, measured)


@dataclass(frozen=True, eq=False)
class SpanAtoms:
    """Both sides on the ids in common and, in the last column, the span; the teacher's rest."""

    student: Float[Tensor, "spans k_and_rest"]  # nats; read only where retained
    teacher: Float[Tensor, "spans k_and_rest"]  # nats
    teacher_rest: Float[Tensor, "spans"]  # nats
    retained: Bool[Tensor, "spans k_and_rest"]


def span_atoms(student: StudentLogprobs, targets: SpanTargets, match: VocabularyMatch) -> SpanAtoms:
    """Return the atoms of each span; an atom that either side rules out is part of the rest."""
    positions, rows = targets.student_starts, targets.teacher_starts
    ids = targets.topk_ids[rows]
    entries = targets.topk_logprobs[rows].to(student.dtype)
    partners = match.student_of[ids.clamp_min(0)]
    own_first = ids == targets.teacher_ids[rows][:, None]
    logprobs = student.logprobs(
        positions.repeat_interleave(ids.shape[1]), partners.clamp_min(0).flatten()
    ).view(ids.shape)
    named = (ids >= 0) & (partners >= 0) & ~own_first
    named &= partners != targets.labels[positions][:, None]
    student_atoms = torch.cat([logprobs, student_span_logprobs(student, targets)[:, None]], dim=1)
    span = teacher_span_logprobs(targets, student.dtype)
    teacher_atoms = torch.cat([entries, span[:, None]], dim=1)
    retained = torch.nn.functional.pad(named, (0, 1), value=True)
    retained = retained & ~torch.isneginf(student_atoms) & ~torch.isneginf(teacher_atoms)
    # A sum of masses, because one minus the retained mass would lose a small tail to rounding. The
    # span is a part of its first token, whether that was sent or is in the tail.
    left = torch.where(retained[:, :-1], -torch.inf, entries).exp().sum(dim=1)
    left = left + targets.tail_logprobs[rows].to(student.dtype).exp()
    left = left - torch.where(retained[:, -1], span.exp(), 0.0)
    # Rounding may make it negative; where nothing is compared, all mass is the rest.
    rest = left.clamp_min(0).log().masked_fill(~retained.any(dim=1), 0.0)
    return SpanAtoms(student_atoms, teacher_atoms, rest, retained)
