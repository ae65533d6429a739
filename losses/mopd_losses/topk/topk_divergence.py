"""Any divergence of ``divergences`` from a teacher's top-k, in one of three truncated forms.

With the identity as projection this is the same-vocabulary top-k loss (``topk_kl``); with any other
projection, the student's distribution is projected on the teacher's ids (``ctkd``). Ids that only
one side has a token for are not compared; the form decides about their mass:

* ``tail_bucket`` (E): the student's is part of the rest, one bucket a side; the teacher's is
  excluded. The only form that corrects a student for mass that it puts anywhere outside the
  teacher's top-k, to the right amount.
* ``generalised`` (D): excluded, and the retained masses are compared unscaled.
* ``renormalised`` (A): excluded, and the retained masses are scaled to one on either side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.config import TopKDivergenceSettings
from mopd_losses.core.compared_tokens import compared_positions
from mopd_losses.core.loss import AlignedPair, LossOutput
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.divergences.divergences import divergence_of
from mopd_losses.divergences.truncation import (
    floored_tail,
    generalised_forward_kl,
    generalised_reverse_kl,
    log_mass,
    renormalised,
    student_tail,
    with_tail_bucket,
)
from mopd_losses.projection.cache import DeviceProjection
from mopd_losses.projection.projected_logprobs import projected_logprobs
from mopd_losses.topk.topk_targets import TopKTargets, concatenate_targets, topk_targets
from mopd_protocol.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class TopKDivergenceLoss:
    """A divergence from a projected top-k: a ``Loss``.

    The value, at the first position of a span, is multiplied by the square of the temperature, so
    that gradients keep their size (Hinton et al. 2015). ``measured``: ``teacher_mass`` and
    ``student_mass`` on the compared ids, ``unsupported_mass`` of the teacher on ids that no student
    token projects to, and ``unprojected_mass`` of the student on ids without a projection.

    Args:
        projection: student ids -> teacher ids, on the student's device.
        teacher_temperature: the temperature of the targets.

    Raises:
        ConfigError: if the form needs the teacher's distribution at ``kd_temperature`` and the
            teacher scored at another one.
        DataError: on call, if the student's width is not the projection's.
    """

    projection: DeviceProjection
    settings: TopKDivergenceSettings
    teacher_temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.settings.form != "renormalised" and self.temperature != self.teacher_temperature:
            raise ConfigError(
                f"form '{self.settings.form}': kd_temperature {self.temperature:g} needs a teacher "
                f"that scores at {self.temperature:g} (found {self.teacher_temperature:g}), as "
                "a truncated distribution does not contain its tail's mass at another one. "
                "Set the teacher's temperature, or use form 'renormalised'.",
                key="loss.kd_temperature",
            )

    @property
    def temperature(self) -> float:
        """Softmax temperature of both sides."""
        return self.settings.kd_temperature or self.teacher_temperature

    def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> TopKTargets:
        """See ``Loss``."""
        parts = [topk_targets(c.alignment, c.score.topk) for c in comparisons]
        return concatenate_targets(parts, offsets)

    def __call__(self, student: StudentLogprobs, targets: TopKTargets) -> LossOutput:
        """See ``Loss``."""
        self.require_width(student)
        projected = projected_logprobs(
            student, targets.positions, targets.ids, self.projection, temperature=self.temperature
        )
        return self.compare(
            student, targets.positions, projected, targets.logprobs, targets.tail_logprobs
        )

    def require_width(self, student: StudentLogprobs) -> None:
        """Raise DataError for a student of another width than the projection's."""
        width = len(self.projection.real_ids)
        if student.width != width:
            raise DataError(
                f"projection: logit width differs (found {student.width}, expected {width}). "
                "Build the projection for this student's head.",
                key="logit_width",
            )

    def compare(
        self,
        student: StudentLogprobs,
        positions: Int64[Tensor, "compared"],
        projected: Float[Tensor, "compared k"],
        teacher: Float[Tensor, "compared k"],
        tail: Float[Tensor, "compared"],
    ) -> LossOutput:
        """Compare projected log-probabilities with a teacher's top-k and tail, in nats.

        Teacher mass on ids that the student cannot name is excluded, and the position weighs less:
        as part of the rest it would reward mass that the student puts anywhere.
        """
        teacher, tail = teacher.to(student.dtype), tail.to(student.dtype)
        retained = ~torch.isneginf(projected) & ~torch.isneginf(teacher)
        unsupported = log_mass(teacher.masked_fill(retained, -torch.inf))
        # A row that compares nothing is all tail, even if the teacher's row is empty.
        tail = tail.masked_fill(~retained.any(dim=1), 0.0)
        values = self._values(projected, teacher, tail, retained) * self.temperature**2
        if self.settings.form == "tail_bucket":
            values = values * (1 - unsupported.exp()).clamp_min(0)
        per_token = student.zeros().index_add(0, positions, values)
        with torch.no_grad():
            measured = {
                "teacher_mass": log_mass(teacher.masked_fill(~retained, -torch.inf)).exp(),
                "student_mass": -torch.expm1(student_tail(projected, retained)),
                "unsupported_mass": unsupported.exp(),
                "unprojected_mass": self._unprojected_mass(student, positions),
            }
        # A single id, scaled to one on both sides, compares nothing.
        compared = retained.sum(dim=1) > (self.settings.form == "renormalised")
        return LossOutput(per_token, compared_positions(student, positions, compared), measured)

    def _values(
        self, student: Tensor, teacher: Tensor, teacher_tail: Tensor, retained: Tensor
    ) -> Tensor:
        """[compared], nats before the temperature's factor; see ``with_tail_bucket``."""
        divergence = divergence_of(self.settings)
        match self.settings.form:
            case "renormalised":
                scaled = teacher * (self.teacher_temperature / self.temperature)
                return divergence(renormalised(student, retained), renormalised(scaled, retained))
            case "generalised":
                forward = self.settings.divergence == "forward_kl"
                kl = generalised_forward_kl if forward else generalised_reverse_kl
                return kl(student, teacher, retained)
            case "tail_bucket":
                student, teacher = with_tail_bucket(student, teacher, teacher_tail, retained)
                if self.settings.unbounded_where_teacher_vanishes:
                    teacher = floored_tail(student, teacher)
                return divergence(student, teacher)

    def _unprojected_mass(
        self, student: StudentLogprobs, positions: Int64[Tensor, "compared"]
    ) -> Float[Tensor, "compared"]:
        """[compared], the student's probability of ids without a projection."""
        ids = self.projection.unprojected_ids
        logprobs = student.logprobs(
            positions.repeat_interleave(len(ids)),
            ids.repeat(len(positions)),
            temperature=self.temperature,
        )
        return logprobs.view(len(positions), len(ids)).exp().sum(dim=1)
