"""Prefix KL: a cross-tokenizer divergence on text, at every token boundary of either side.

At a boundary ``o`` of the student's or the teacher's tokens, both models determine what comes next,
in rows that are computed anyway: the row that begins at ``o``, and rows that begin before it, with
every token that spells the text up to ``o`` and continues (the row of `` 2024`` also gives the
probability that ``024`` follows `` 2``; a student that produced ``5`` and stopped has given the
probability of ``57`` in that row). A *cell* ``c`` is a string that may follow ``o``; a side's mass
of it is

    M(c | o) = sum over open rows r of path(r) * sum of p_r(v) over tokens v
                                                whose bytes begin with text[start(r):o] + c

and the loss compares ``M(c | o) / Z(o)`` of both sides over the cells of ``o`` and everything else
(the rest), where ``Z(o)`` is the mass of all that is open. ``path(r)`` is the probability of the
side's sampled tokens from the first open row up to ``r``; the student's carries gradients: that is
how it learns to stop less, or more. All tokens that begin with a string are one range of the
vocabulary in the order of bytes (``sorted_vocabulary``), so a mass is a sum over a range. The
teacher's candidates name the cells (``naming``); cells are disjoint events of text for any
tokenizers, and two models that agree about text differ by nothing.

**Bounds.** Mass of a cell that is part of a token which was not sampled is known by an upper bound
only (``other_tokenizations``). Both sides are filled towards each other within these bounds
(``unknown_mass``). The bounds are constants of the gradient: the student would learn the bounding
tokens for the sole reason that less is known of it then. Only what is in the rest, and is mass of
some token for certain, has a gradient: a shorter token is learned where the teacher ends it.

**The end of a shorter token.** Inside the student's `` 192``, a teacher's comma after `` 19`` is
the student's token `` 19``. The likely candidates that end this token are one cell, whose mass the
student has in one token. Other text that ends it is part of the teacher's rest: the cell takes from
the rest what the student's token exceeds it by.

**Inside a token, in expectation.** The second digit of a student's `` 47`` is compared with a
teacher of single digits only where the student sampled `` 4``. KL(teacher || student) of the
complete token is the first digit's plus the expectation of the second's over the *teacher's* first
digits; sampling gives the expectation over the student's. So a boundary inside a token weighs the
ratio of the two masses of the token's beginning, at most ``HIGHEST_RATIO``, as far as the
divergence is an expectation over the teacher (``teacher_share``). Where the teacher is sure of the
beginning, ``lookaheads`` replace the ratio by the exact weight. The student's rest there is at
least ``TAIL_FLOOR``, or the teacher's if that is less: its row has only the tokens with the same
beginning, while most other text is divided otherwise by its tokenizer.

What is neglected: other divisions more than two tokens back, the tail of a teacher's rows that do
not begin at ``o``, tokens beyond the top-k that begin with a cell, and, at boundaries that the
teacher reaches with little mass, what its top-k does not contain: such a boundary weighs
``mass / mass_floor``. Compared are the common blocks of both texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mopd_losses.config import PrefixKlConfig
from mopd_losses.core.compared_tokens import compared_positions
from mopd_losses.core.loss import AlignedPair, LossOutput
from mopd_losses.core.segments import segment_logsumexp
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.divergences.divergences import divergence_of, teacher_share
from mopd_losses.divergences.truncation import (
    TAIL_MARGIN,
    floored_tail,
    log_mass,
    student_tail,
    with_tail_bucket,
)
from mopd_losses.prefix.preparation import Preparation
from mopd_losses.prefix.targets import WHOLE_ROW, PrefixTargets, RangeReadings
from mopd_losses.prefix.unknown_mass import UnknownMass, filled_sides
from mopd_protocol.errors import DataError

#: The highest weight of a boundary inside a token: higher ones are rarer, and their noise greater.
HIGHEST_RATIO = 3.0


@dataclass(frozen=True, eq=False)
class PrefixKlLoss:
    """``prefix_kl`` with its settings: a ``Loss`` for one pair of tokenizers."""

    preparation: Preparation
    settings: PrefixKlConfig
    temperature: float = 1.0
    _sorted_ids: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> PrefixTargets:
        """See ``Loss``."""
        return self.preparation.targets(
            comparisons,
            offsets,
            mass_floor=self.settings.mass_floor,
            bounds=self.settings.bounds,
        )

    def __call__(self, student: StudentLogprobs, targets: PrefixTargets) -> LossOutput:
        """See ``Loss``.

        Raises:
            DataError: if the student's head is narrower than its tokenizer.
        """
        vocabulary = self.preparation.student
        if student.width < vocabulary.table.size:
            raise DataError(
                f"student: logits are narrower than the tokenizer (found width {student.width}, "
                f"expected at least {vocabulary.table.size} ids). Use the tokenizer of this model.",
                key="student",
            )
        if student.device not in self._sorted_ids:
            self._sorted_ids[student.device] = torch.from_numpy(vocabulary.ids).to(student.device)
        sorted_ids = self._sorted_ids[student.device]
        return prefix_kl(student, targets, sorted_ids, self.settings, temperature=self.temperature)


def prefix_kl(
    student: StudentLogprobs,
    targets: PrefixTargets,
    sorted_ids: Tensor,
    settings: PrefixKlConfig,
    *,
    temperature: float = 1.0,
) -> LossOutput:
    """Return nats per student token; a boundary's divergence is at the position of its last row.

    Args:
        targets: the teacher at every boundary, at the same ``temperature``.
        sorted_ids: int64 [tokens], the student's ids in the order of their bytes.
        temperature: softmax temperature of both sides; the value is multiplied by its square.

    Returns:
        ``measured``, one value a boundary: ``teacher_mass`` and ``student_mass`` of all cells,
        ``path_mass`` and ``student_path_mass`` of the text since the first open row, and
        ``path_weight``, below one if the teacher's path mass is under the floor.
    """
    named, known, bounding, begun = _student_cells(student, targets, sorted_ids, temperature)
    teacher, teacher_rest = targets.cells.to(student.dtype), targets.rests.to(student.dtype)
    retained = ~torch.isneginf(named) & ~torch.isneginf(teacher)
    unsupported = log_mass(teacher.masked_fill(retained, -torch.inf))
    teacher_rest = torch.logaddexp(teacher_rest, unsupported)
    teacher, teacher_rest = _with_ends(teacher, teacher_rest, named.detach(), targets.ends)
    # A boundary without a cell compares nothing: all of it is rest.
    compared = retained.any(dim=1)
    teacher_rest = teacher_rest.masked_fill(~compared, 0.0)
    student_side, teacher_side = with_tail_bucket(named, teacher, teacher_rest, retained)
    shares = teacher_side.detach()[:, :-1].exp().sum(dim=1)
    if len(targets.bounding.boundaries) or not targets.teacher_bounds.isneginf().all():
        student_side, teacher_side = filled_sides(
            student_side,
            teacher_side,
            UnknownMass(_with_rest(targets.missing.to(student.dtype)), *bounding),
            UnknownMass(
                _with_rest(torch.where(targets.teacher_missing, 0.0, -torch.inf).to(student.dtype)),
                targets.teacher_bounds.to(student.dtype),
                torch.full_like(targets.teacher_bounds, -torch.inf, dtype=student.dtype),
            ),
        )
    # Inside a token of the student, text that no cell names is mostly divided otherwise.
    inside = ~targets.token_masses.isnan().unsqueeze(1)
    student_side = torch.where(inside, floored_tail(teacher_side, student_side), student_side)
    if settings.unbounded_where_teacher_vanishes:
        teacher_side = floored_tail(student_side, teacher_side)
    weights = targets.weights.to(student.dtype)
    values = divergence_of(settings)(student_side, teacher_side) * weights
    values = values * _ratios(begun, targets, teacher_share(settings))
    per_token = student.zeros().index_add(0, targets.positions, values * temperature**2)
    with torch.no_grad():
        measured = {
            "teacher_mass": shares,
            "student_mass": -torch.expm1(student_tail(named, retained)),
            "path_mass": targets.path_masses.to(student.dtype),
            "student_path_mass": known.exp(),
            "path_weight": weights,
        }
    # The tokens of a path are compared with the boundary that they lead to.
    step_boundaries = targets.path_boundaries[targets.step_paths]
    shares = compared_positions(
        student,
        torch.cat([targets.positions, targets.step_positions]),
        torch.cat([weights * compared, (weights * compared)[step_boundaries]]),
    )
    return LossOutput(per_token, shares, measured)


def _with_ends(
    teacher: Float[Tensor, "boundaries cells"],
    rest: Float[Tensor, "boundaries"],
    student: Float[Tensor, "boundaries cells"],
    ends: Bool[Tensor, "boundaries cells"],
) -> tuple[Float[Tensor, "boundaries cells"], Float[Tensor, "boundaries"]]:
    """The teacher's cells and its rest with the most that the student's token that ends here may
    have of the rest: what ends it is known in part."""
    most = torch.logaddexp(teacher, rest.unsqueeze(1))
    raised = torch.where(ends, student.maximum(teacher).minimum(most), teacher)
    moved = torch.where(ends, raised.exp() - teacher.exp(), 0.0).sum(dim=1)
    left = (rest.exp() - moved).clamp_min(0.0).log()
    return raised, torch.where(ends.any(dim=1), left, rest)


def _with_rest(cells: Float[Tensor, "boundaries cells"]) -> Float[Tensor, "boundaries cells+1"]:
    """Add the rest, which includes texts that no cell names and may lack mass with any cell."""
    return torch.nn.functional.pad(cells, (0, 1), value=0.0)


def _ratios(
    begun: Float[Tensor, "boundaries"], targets: PrefixTargets, teacher_share: float
) -> Float[Tensor, "boundaries"]:
    """The weights of boundaries inside the student's tokens; 1 for all others.

    A boundary that every sample has weighs the mass of the token's beginning.

    Args:
        begun: nats, the student's, of the token's text up to the boundary.
    """
    begun = begun.detach()
    ratios = (targets.token_masses.to(begun.dtype) - begun).exp()
    masses = teacher_share * targets.token_masses.exp() + (1 - teacher_share) * begun.exp()
    ratios = teacher_share * ratios.clamp_max(HIGHEST_RATIO) + (1 - teacher_share)
    ratios = torch.where(targets.in_every_sample, masses.to(begun.dtype), ratios)
    return torch.where(targets.token_masses.isnan(), 1.0, ratios)


def _student_cells(
    student: StudentLogprobs, targets: PrefixTargets, sorted_ids: Tensor, temperature: float
) -> tuple[
    Float[Tensor, "boundaries cells"],
    Float[Tensor, "boundaries"],
    tuple[Float[Tensor, "boundaries"], Float[Tensor, "boundaries"]],
    Float[Tensor, "boundaries"],
]:
    """The student's mass of each cell, of what is open at its boundary; that mass; the mass of its
    bounding tokens, of what is open, and of those among them that are certainly mass of what is
    open; and the mass of what its last open row has begun: nats."""
    boundaries, width = targets.cells.shape
    steps = student.logprobs(targets.step_positions, targets.step_ids, temperature=temperature)
    paths = torch.zeros(
        len(targets.path_boundaries) + 1, dtype=student.dtype, device=student.device
    )
    paths = paths.index_add(0, targets.step_paths, steps)  # the last one, -1, has no token

    def masses(readings: RangeReadings) -> Tensor:
        is_range = readings.stops != WHOLE_ROW
        nats = torch.zeros(len(is_range), dtype=student.dtype, device=student.device)
        nats = nats.index_put(
            (is_range.nonzero().squeeze(1),),
            student.range_logmasses(
                readings.positions[is_range],
                readings.starts[is_range],
                readings.stops[is_range],
                sorted_ids,
                temperature=temperature,
            ),
        )
        return nats + paths[readings.paths]

    nats = masses(targets.known)
    known = segment_logsumexp(nats, targets.known.boundaries, boundaries)
    numbers = torch.arange(boundaries, device=student.device)
    last = torch.searchsorted(targets.known.boundaries, numbers, right=True) - 1
    begun = (nats - paths[targets.known.paths])[last]
    bounding = masses(targets.bounding)
    missing = segment_logsumexp(bounding, targets.bounding.boundaries, boundaries)
    is_counted = targets.bounding.cells == 1
    counted = segment_logsumexp(
        bounding[is_counted], targets.bounding.boundaries[is_counted], boundaries
    )
    segments = targets.named.boundaries * width + targets.named.cells
    named = segment_logsumexp(masses(targets.named), segments, boundaries * width)
    open_mass = torch.where(torch.isneginf(known), 0.0, known)
    open_mass = open_mass + torch.log1p(-(counted - open_mass).exp().clamp_max(1 - TAIL_MARGIN))
    named = named.view(boundaries, width) - open_mass.unsqueeze(1)
    return named, known, (missing.detach() - open_mass.detach(), counted - open_mass), begun
