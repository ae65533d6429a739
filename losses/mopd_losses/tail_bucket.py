"""Divergences between truncated distributions, with everything not retained in one tail bucket.

Both sides become distributions on (retained ids, rest). Coarse-graining never raises a divergence,
so the value is a lower bound of the full one; it is zero, with zero gradient, exactly where the
student's retained probabilities equal the teacher's. (losses: form E; TRL's ``add_tail``, TA-OPD.)
"""

import math

import torch
from torch import Tensor

#: The student's retained mass is held below 1 by this much; a tail clamped so is a constant.
TAIL_MARGIN = 1e-6

#: Reverse KL grows without bound as the teacher's tail vanishes; its mass is held above this.
TEACHER_TAIL_FLOOR = 1e-4


def tail_forward_kl(
    student: Tensor, teacher: Tensor, teacher_tail: Tensor, retained: Tensor
) -> Tensor:
    """``KL(teacher || student)`` on (retained ids, rest), in nats.

    Args:
        student: [places, k], log-probabilities; read only where ``retained``.
        teacher: [places, k], log-probabilities; what is not retained must be in the tail already.
        teacher_tail: [places], log of the teacher's mass outside the retained ids.
        retained: bool [places, k].

    Returns:
        [places].
    """
    teacher, teacher_tail = _normalised(teacher, teacher_tail, retained)
    kept = _masked(teacher - student, retained) * _masked(teacher.exp(), retained)
    rest = teacher_tail.exp() * (_finite(teacher_tail) - student_tail(student, retained))
    return kept.sum(dim=1) + rest


def tail_reverse_kl(
    student: Tensor, teacher: Tensor, teacher_tail: Tensor, retained: Tensor
) -> Tensor:
    """``KL(student || teacher)`` on (retained ids, rest), in nats; arguments as for forward."""
    teacher, teacher_tail = _normalised(teacher, teacher_tail, retained)
    log_tail = student_tail(student, retained)
    floor = math.log(TEACHER_TAIL_FLOOR)
    kept = _masked(student - teacher, retained) * _masked(student, retained, -torch.inf).exp()
    return kept.sum(dim=1) + log_tail.exp() * (log_tail - teacher_tail.clamp_min(floor))


def student_tail(student: Tensor, retained: Tensor) -> Tensor:
    """[places], log of the student's mass outside the retained ids."""
    lowest = torch.finfo(student.dtype).min
    # The lowest finite number, not -inf: a row that retains nothing must not differentiate to NaN.
    kept = torch.nn.functional.pad(_masked(student, retained, lowest), (0, 1), value=lowest)
    log_kept = kept.logsumexp(dim=1).clamp_max(math.log1p(-TAIL_MARGIN))
    # log(1 - e^x) without cancellation (Mächler 2012): one form on either side of -ln 2.
    near_one = log_kept > -math.log(2)
    return torch.where(
        near_one,
        torch.log(-torch.expm1(torch.where(near_one, log_kept, -1.0))),
        torch.log1p(-torch.exp(torch.where(near_one, -1.0, log_kept))),
    )


def _normalised(teacher: Tensor, tail: Tensor, retained: Tensor) -> tuple[Tensor, Tensor]:
    """The teacher's masses scaled to sum to one: half-precision logprobs may not quite."""
    everything = torch.cat([teacher.masked_fill(~retained, -torch.inf), tail.unsqueeze(1)], dim=1)
    total = everything.logsumexp(dim=1)
    return teacher - total.unsqueeze(1), tail - total


def _masked(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """``values`` where the mask holds; inputs are masked, never products (0 * inf is NaN)."""
    return torch.where(mask, values, fill)


def _finite(values: Tensor) -> Tensor:
    """Zero in place of -inf, for a factor that is multiplied by e^-inf."""
    return torch.where(torch.isneginf(values), 0.0, values)
