"""Prefix KL: an exact cross-tokenizer divergence at every token boundary of either side.

Wherever a token of the student *or* of the teacher ends, both models have an opinion about what
comes next, and both can be read from rows that are there already. At a boundary ``o`` of the text
so far, each side's opinion is its distribution given *the text up to o, and that one of the two
tokenizers has a boundary at o*. It is put together from up to three kinds of rows:

* The row that starts at ``o``, where the side has a boundary there. It weighs what the side's own
  tokens on the way there weigh (its *path*).
* **Inside a long token.** A row that starts before ``o`` says what follows ``o`` with every token
  that it knows to begin with the text up to ``o`` and to go on, if the other side writes that token
  with a boundary at ``o`` (it *crosses* ``o``).
* **After a token that could have been longer.** The same rows count where the side *does* have a
  boundary at ``o``: a student that wrote ``5`` and stopped has said in that very row how likely
  ``57`` was. Its next row only knows that it stopped, and answers another question.

    X(e | o) = sum over open rows r of path(r) * sum of p_r(v) over tokens v that say e after o
               divided by the same sum over everything that X says after o

``path(r)`` is the probability of X's own tokens from the first open row up to ``r``; the student's
carries gradients: that is how it learns to stop less, or more. Where only the row at ``o`` is open
its path is one and this is the ordinary conditional; for one tokenizer on both sides it always is,
and the loss is the same-vocabulary tail-bucket form.

Events are units that both sides can name (``shared_units``): tokens of both vocabularies, and
control tokens by role or name, so that an end of turn is an event like any other. A token of one
side counts for its root. Named are the units that the teacher's top-k leads to; all others, and
the teacher's tail, are one bucket, ``rest``. (Naming the student's own token too, where the teacher
does not, would not be the same-vocabulary form, and would need a mass that a top-k does not have.)

Three things that the design left open were decided by exactness (tests/reference/prefix_kl.py):

1. A side that has no boundary at ``o`` may still *end a token* there (``5`` where ``57`` was
   written). That is an opinion too, "not what my longer tokens say", but about what, only a row
   that was never computed knows. It belongs to the whole, and to ``rest``. Without it, stopping is
   never learnt from such a teacher. An event that a side could only say by ending at ``o`` first
   cannot be named either.
2. A token that crosses ``o`` says ``w`` and leaves open what comes after. Longer units that begin
   with ``w``, and that this side would write through that token, are counted together with ``w``.
3. Rows are compared as far as both have read the same bytes: the common beginning of two texts.

Exact for models that write canonically, by longest match, if each side has a token that ends at
the other's boundaries within its own. What is neglected elsewhere is ways over tokens that were
not written (a model with ``5``, ``7`` and ``573`` but not ``57`` says ``574`` in rows that nobody
computed), the tail of rows that do not start at ``o``, and spelling in context (a token's pieces
are those of its bytes alone; the token really written counts wherever the other side cuts it).
Tokens with one root are one event; where what follows the root would be asked for nowhere, the way
to the next boundary of both sides is compared as a whole (``prefix_spans``). Units that too many
tokens begin with (single bytes; ``shared_units`` has the limits) stay in ``rest``: coarser, but as
exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mopd_losses.config import PrefixKlConfig
from mopd_losses.core.loss import AlignedPair, LossOutput
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.divergences.divergences import divergence_of
from mopd_losses.divergences.truncation import (
    floored_tail,
    log_mass,
    student_tail,
    with_tail_bucket,
)
from mopd_losses.prefix.junctions import Junctions
from mopd_losses.prefix.preparation import prefix_targets
from mopd_losses.prefix.shared_units import SharedUnits
from mopd_losses.prefix.targets import PrefixTargets, Readings
from mopd_losses.projection.projected_logprobs import segment_logsumexp
from mopd_protocol.errors import DataError


@dataclass(frozen=True, eq=False)
class PrefixKlLoss:
    """``prefix_kl`` with its settings: a ``Loss`` for one pair of vocabularies."""

    units: SharedUnits
    settings: PrefixKlConfig
    temperature: float = 1.0

    @cached_property
    def junctions(self) -> Junctions:
        """What was found where tokens cross boundaries, remembered from step to step."""
        return Junctions(self.units)

    def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> PrefixTargets:
        """See ``Loss``."""
        return prefix_targets(
            comparisons, offsets, self.junctions, mass_floor=self.settings.mass_floor
        )

    def __call__(self, student: StudentLogprobs, targets: PrefixTargets) -> LossOutput:
        """See ``Loss``.

        Raises:
            DataError: when the student's head is narrower than its tokenizer.
        """
        if student.width < self.units.student.table.size:
            raise DataError(
                f"logits of width {student.width} for a tokenizer of "
                f"{self.units.student.table.size} ids; is this the tokenizer of this model?"
            )
        return prefix_kl(student, targets, self.settings, temperature=self.temperature)


def prefix_kl(
    student: StudentLogprobs,
    targets: PrefixTargets,
    settings: PrefixKlConfig,
    *,
    temperature: float = 1.0,
) -> LossOutput:
    """Nats per student token; a boundary's divergence stands at the token there.

    Args:
        targets: the teacher at every boundary, at the same ``temperature``.
        temperature: softmax temperature of both sides; the value is multiplied by its square.

    Returns:
        ``measured``, one a boundary: ``teacher_mass`` and ``student_mass`` on the named events,
        ``path_mass`` and ``student_path_mass``, how likely either side found the way from the first
        open row to here, and ``path_weight``, below one where the teacher's was under the floor.
    """
    events = _student_events(student, targets, temperature)
    teacher = targets.events.to(student.dtype)
    retained = ~torch.isneginf(events.named) & ~torch.isneginf(teacher)
    unsupported = log_mass(teacher.masked_fill(retained, -torch.inf))
    teacher_rest = torch.logaddexp(targets.rests.to(student.dtype), unsupported)
    # A place that compares nothing is all rest.
    teacher_rest = teacher_rest.masked_fill(~retained.any(dim=1), 0.0)
    ours, theirs = with_tail_bucket(events.named, teacher, teacher_rest, retained)
    shares = theirs.detach()[:, :-1].exp().sum(dim=1)
    theirs = floored_tail(theirs) if settings.unbounded_where_teacher_vanishes else theirs
    values = divergence_of(settings)(ours, theirs) * targets.weights.to(student.dtype)
    per_token = student.zeros().index_add(0, targets.positions, values * temperature**2)
    with torch.no_grad():
        measured = {
            "teacher_mass": shares,
            "student_mass": -torch.expm1(student_tail(events.named, retained)),
            "path_mass": targets.path_masses.to(student.dtype),
            "student_path_mass": events.known.exp(),
            "path_weight": targets.weights.to(student.dtype),
        }
        # A span's two events are no sign of what a top-k holds.
        boundaries = ~targets.are_spans
        measured = {name: found[boundaries] for name, found in measured.items()}
    return LossOutput(per_token, measured)


@dataclass(frozen=True, eq=False)
class _StudentEvents:
    named: Tensor  # [places, events], nats, given the text so far
    known: Tensor  # [places], nats: of the text so far, from the first open row


def _student_events(
    student: StudentLogprobs, targets: PrefixTargets, temperature: float
) -> _StudentEvents:
    """The student's side of every place, each a segment log-sum-exp of what was read."""
    places, width = targets.events.shape
    steps = student.logprobs(targets.step_positions, targets.step_ids, temperature=temperature)
    paths = torch.zeros(len(targets.path_places) + 1, dtype=student.dtype, device=student.device)
    paths = paths.index_add(0, targets.step_paths, steps)  # the last one, -1, is of no token

    def summed(readings: Readings, segments: Tensor, count: int) -> Tensor:
        numbers, ids = targets.ids_of(readings)
        read = student.logprobs(
            readings.positions[numbers], ids.clamp_min(0), temperature=temperature
        ).masked_fill(ids < 0, 0.0)
        return segment_logsumexp(read + paths[readings.paths[numbers]], segments[numbers], count)

    # Everything from the place's likeliest path: the common part of long paths cancels here.
    known = summed(targets.known, targets.known.places, places)
    segments = targets.named.places * width + targets.named.columns
    named = summed(targets.named, segments, places * width).view(places, width)
    reached = ~torch.isneginf(known)
    given = torch.where(reached, known, 0.0)
    return _StudentEvents(named - given.unsqueeze(1), known)
