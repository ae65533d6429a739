"""Any divergence of ``divergences`` from a teacher's top-k, in one of three truncated forms.

Through the identity for a projection this is the same-vocabulary top-k loss; through any other, it
compares the student's distribution projected on the teacher's ids (``ctkd``). Ids that only one
side can say are not compared; what becomes of their mass is the form's matter:

* ``tail_bucket`` (E): it goes to the rest, one bucket a side. The only form that corrects a student
  for mass which it puts anywhere outside the teacher's top-k, and holds it to the right amount.
* ``generalised`` (D): it is left out, and the retained masses are compared without being scaled.
* ``renormalised`` (A): it is left out, and the retained masses are scaled to one on either side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.config import TopKDivergenceSettings
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.loss_output import LossOutput
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.divergences.divergences import divergence_of
from mopd_losses.divergences.generalised_kl import generalised_forward_kl, generalised_reverse_kl
from mopd_losses.divergences.renormalised import renormalised
from mopd_losses.divergences.tail_bucket import (
    floored_tail,
    log_mass,
    student_tail,
    with_tail_bucket,
)
from mopd_losses.projection.cache import DeviceProjection
from mopd_losses.projection.projected_logprobs import projected_logprobs
from mopd_losses.topk.topk_targets import TopKTargets, concatenate_targets, topk_targets
from mopd_protocol.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class TopKDivergenceLoss:
    """``topk_divergence`` with its settings: a ``Loss``.

    Raises:
        ConfigError: when the form needs the teacher's distribution at ``kd_temperature`` and the
            teacher scored at another one.
    """

    projection: DeviceProjection
    settings: TopKDivergenceSettings
    teacher_temperature: float = 1.0  # that the teacher scored at

    def __post_init__(self) -> None:
        _require_temperature(self.settings, self.teacher_temperature)

    def targets(
        self, comparisons: Sequence[AlignedPair], slot_offsets: Sequence[int]
    ) -> TopKTargets:
        """See ``Loss``."""
        parts = [topk_targets(c.alignment, c.score.topk) for c in comparisons]
        return concatenate_targets(parts, slot_offsets)

    def __call__(self, student: StudentLogprobs, targets: TopKTargets) -> LossOutput:
        """See ``Loss``."""
        return topk_divergence(
            student,
            targets,
            self.projection,
            self.settings,
            teacher_temperature=self.teacher_temperature,
        )


def topk_divergence(
    student: StudentLogprobs,
    targets: TopKTargets,
    projection: DeviceProjection,
    settings: TopKDivergenceSettings,
    *,
    teacher_temperature: float = 1.0,
) -> LossOutput:
    """Nats per student token; a span's divergence stands at the span's first token.

    The value is multiplied by the square of the temperature, so that gradients keep their size
    (Hinton et al. 2015).

    Args:
        targets: the teacher at the start of each span.
        projection: student ids -> teacher ids, on the student's device.
        teacher_temperature: that ``targets`` were made at.

    Returns:
        ``measured``: ``teacher_mass`` and ``student_mass`` on the compared ids, each at the
        temperature that it was made at, ``unsupported_mass`` of the teacher on ids that no student
        token reaches, and ``unprojected_mass`` of the student on ids that reach no teacher token.

    Raises:
        ConfigError: see ``TopKDivergenceLoss``.
        DataError: when the student's width is not the projection's.
    """
    temperature = _require_temperature(settings, teacher_temperature)
    if student.width != len(projection.real_ids):
        raise DataError(
            f"logits of width {student.width} for a projection of "
            f"{len(projection.real_ids)} rows; build the projection for this student's head"
        )
    projected = projected_logprobs(
        student, targets.slots, targets.ids, projection, temperature=temperature
    )
    teacher = targets.logprobs.to(student.dtype)
    retained = ~torch.isneginf(projected) & ~torch.isneginf(teacher)
    unsupported = log_mass(teacher.masked_fill(retained, -torch.inf))
    teacher_tail = torch.logaddexp(targets.tail_logprobs.to(student.dtype), unsupported)
    # A row that compares nothing is all tail, also where the teacher said nothing whatever.
    teacher_tail = teacher_tail.masked_fill(~retained.any(dim=1), 0.0)
    if settings.form == "renormalised":
        warmed = teacher * (teacher_temperature / temperature)
        values = divergence_of(settings)(
            renormalised(projected, retained), renormalised(warmed, retained)
        )
    elif settings.form == "generalised":
        forward = settings.divergence == "forward_kl"
        generalised_kl = generalised_forward_kl if forward else generalised_reverse_kl
        values = generalised_kl(projected, teacher, retained)
    else:
        ours, theirs = with_tail_bucket(projected, teacher, teacher_tail, retained)
        theirs = floored_tail(theirs) if settings.unbounded_where_teacher_vanishes else theirs
        values = divergence_of(settings)(ours, theirs)
    per_token = student.zeros().index_add(0, targets.slots, values * temperature**2)
    with torch.no_grad():
        measured = {
            "teacher_mass": -torch.expm1(teacher_tail.clamp_max(0)),
            "student_mass": -torch.expm1(student_tail(projected, retained)),
            "unsupported_mass": unsupported.exp(),
            "unprojected_mass": _unprojected_mass(student, targets.slots, projection, temperature),
        }
    return LossOutput(per_token, measured)


def _require_temperature(settings: TopKDivergenceSettings, teacher_temperature: float) -> float:
    """The temperature of both sides; raises ConfigError where the teacher's top-k lacks it."""
    temperature = settings.kd_temperature or teacher_temperature
    if settings.form != "renormalised" and temperature != teacher_temperature:
        raise ConfigError(
            f"form '{settings.form}' at kd_temperature {temperature:g} needs a teacher that scored "
            f"at {temperature:g}, but this one scored at {teacher_temperature:g}: a truncated "
            "distribution does not say what its tail weighs at another temperature; set the "
            "teacher's temperature, or use form 'renormalised'"
        )
    return temperature


def _unprojected_mass(
    student: StudentLogprobs,
    slots: Int64[Tensor, "places"],
    projection: DeviceProjection,
    temperature: float,
) -> Float[Tensor, "places"]:
    """[places], the student's probability of ids that reach no teacher id."""
    ids = projection.unprojected_ids
    read = student.logprobs(
        slots.repeat_interleave(len(ids)), ids.repeat(len(slots)), temperature=temperature
    )
    return read.view(len(slots), len(ids)).exp().sum(dim=1)
