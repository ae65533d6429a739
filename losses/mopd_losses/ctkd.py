"""CTKD: cross-tokenizer distillation from a teacher's top-k through a projection matrix.

The student's next-token distribution is projected on the teacher's vocabulary and compared with
the teacher's truncated one at the start of every aligned span; whatever either side has outside
the ids that both can name is one tail bucket. With the identity for a projection, this *is* the
same-vocabulary top-k KL. (X-Token's P-KL, arXiv 2605.21699, on first rows and with a tail bucket
in place of renormalisation.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mopd_losses.loss import Comparison
from mopd_losses.loss_output import LossOutput
from mopd_losses.projected_logprobs import projected_logprobs
from mopd_losses.projection_cache import DeviceProjection
from mopd_losses.student_rows import StudentRows
from mopd_losses.tail_bucket import student_tail, tail_forward_kl, tail_reverse_kl
from mopd_losses.topk_targets import TopKTargets, concatenate_targets, topk_targets
from mopd_protocol.errors import DataError

Divergence = Literal["forward_kl", "reverse_kl"]
_DIVERGENCES = {"forward_kl": tail_forward_kl, "reverse_kl": tail_reverse_kl}


@dataclass(frozen=True, eq=False)
class CtkdLoss:
    """``ctkd`` with its settings: a ``Loss``."""

    projection: DeviceProjection
    divergence: Divergence = "forward_kl"
    temperature: float = 1.0

    def targets(
        self, comparisons: Sequence[Comparison], slot_offsets: Sequence[int]
    ) -> TopKTargets:
        """See ``Loss``."""
        parts = [topk_targets(c.alignment, c.score.topk) for c in comparisons]
        return concatenate_targets(parts, slot_offsets)

    def __call__(self, student: StudentRows, targets: TopKTargets) -> LossOutput:
        """See ``Loss``."""
        return ctkd(
            student,
            targets,
            self.projection,
            divergence=self.divergence,
            temperature=self.temperature,
        )


def ctkd(
    student: StudentRows,
    targets: TopKTargets,
    projection: DeviceProjection,
    *,
    divergence: Divergence = "forward_kl",
    temperature: float = 1.0,
) -> LossOutput:
    """Nats per student token; a span's divergence stands at the span's first token.

    Args:
        targets: the teacher at the start of each span, at the same ``temperature``.
        projection: student ids -> teacher ids, on the student's device.
        temperature: softmax temperature of both sides; the value is multiplied by its square, so
            that gradients keep their size (Hinton et al. 2015).

    Returns:
        ``measured``: ``teacher_mass`` and ``student_mass`` on the compared ids,
        ``unsupported_mass`` of the teacher on ids that no student token reaches, and
        ``unprojected_mass`` of the student on ids that reach no teacher token.

    Raises:
        DataError: when the student's width is not the projection's.
    """
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
    unsupported = _log_mass(teacher.masked_fill(retained, -torch.inf))
    teacher_tail = torch.logaddexp(targets.tail_logprobs.to(student.dtype), unsupported)
    # A row that compares nothing is all tail, also where the teacher said nothing whatever.
    teacher_tail = teacher_tail.masked_fill(~retained.any(dim=1), 0.0)
    values = _DIVERGENCES[divergence](projected, teacher, teacher_tail, retained)
    per_token = student.zeros().index_add(0, targets.slots, values * temperature**2)
    with torch.no_grad():
        measured = {
            "teacher_mass": -torch.expm1(teacher_tail.clamp_max(0)),
            "student_mass": -torch.expm1(student_tail(projected, retained)),
            "unsupported_mass": unsupported.exp(),
            "unprojected_mass": _unprojected_mass(student, targets.slots, projection, temperature),
        }
    return LossOutput(per_token, measured)


def _unprojected_mass(
    student: StudentRows, slots: Tensor, projection: DeviceProjection, temperature: float
) -> Tensor:
    """[places], the student's probability of ids that reach no teacher id."""
    ids = projection.unprojected_ids
    read = student.logprobs(
        slots.repeat_interleave(len(ids)), ids.repeat(len(slots)), temperature=temperature
    )
    return read.view(len(slots), len(ids)).exp().sum(dim=1)


def _log_mass(logprobs: Tensor) -> Tensor:
    """[places], log of the summed probabilities of each row; -inf for none."""
    return torch.nn.functional.pad(logprobs, (0, 1), value=-torch.inf).logsumexp(dim=1)
