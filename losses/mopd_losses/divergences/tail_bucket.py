"""Form E of a truncated divergence: everything not retained in one tail bucket.

Both sides become distributions on (retained ids, rest), and any divergence of ``divergences`` can
compare them. Coarse-graining never raises an f-divergence, so the value is a lower bound of the
full one (of all but ``adaptive_kl``); it is zero, with zero gradient, exactly where the student's
retained probabilities equal the teacher's. (losses: form E; TRL's ``add_tail``, TA-OPD.)
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mopd_losses.divergences.divergences import forward_kl, reverse_kl

#: The student's retained mass is held below 1 by this much; a tail clamped so is a constant.
TAIL_MARGIN = 1e-6

#: Reverse KL grows without bound as the teacher's tail vanishes; its mass is held above this.
TEACHER_TAIL_FLOOR = 1e-4


def with_tail_bucket(
    student: Float[Tensor, "places k"],
    teacher: Float[Tensor, "places k"],
    teacher_tail: Float[Tensor, "places"],
    retained: Bool[Tensor, "places k"],
) -> tuple[Float[Tensor, "places k+1"], Float[Tensor, "places k+1"]]:
    """Both sides on (retained ids, rest): log-probabilities, ``-inf`` where not retained.

    Args:
        student: [places, k], log-probabilities; read only where ``retained``.
        teacher: [places, k], log-probabilities; what is not retained must be in the tail already.
        teacher_tail: [places], log of the teacher's mass outside the retained ids.
        retained: bool [places, k].

    Returns:
        Student and teacher, [places, k + 1] each; the last entry is the rest.
    """
    rest = student_tail(student, retained).unsqueeze(1)
    student = torch.cat([student.masked_fill(~retained, -torch.inf), rest], dim=1)
    teacher = teacher.masked_fill(~retained, -torch.inf)
    teacher = torch.cat([teacher, teacher_tail.unsqueeze(1)], dim=1)
    # Scaled to sum to one: half-precision logprobs may not quite.
    return student, teacher - teacher.logsumexp(dim=1, keepdim=True)


def floored_tail(teacher: Float[Tensor, "places entries"]) -> Float[Tensor, "places entries"]:
    """A teacher on (retained ids, rest) whose rest is held above ``TEACHER_TAIL_FLOOR``.

    For the divergences that grow without bound where the teacher says never.
    """
    floor = math.log(TEACHER_TAIL_FLOOR)
    return torch.cat([teacher[:, :-1], teacher[:, -1:].clamp_min(floor)], dim=1)


def tail_forward_kl(
    student: Float[Tensor, "places k"],
    teacher: Float[Tensor, "places k"],
    teacher_tail: Float[Tensor, "places"],
    retained: Bool[Tensor, "places k"],
) -> Float[Tensor, "places"]:
    """[places], ``KL(teacher || student)`` in nats; arguments as for ``with_tail_bucket``."""
    return forward_kl(*with_tail_bucket(student, teacher, teacher_tail, retained))


def tail_reverse_kl(
    student: Float[Tensor, "places k"],
    teacher: Float[Tensor, "places k"],
    teacher_tail: Float[Tensor, "places"],
    retained: Bool[Tensor, "places k"],
) -> Float[Tensor, "places"]:
    """[places], ``KL(student || teacher)`` in nats, with the teacher's tail floored."""
    student, teacher = with_tail_bucket(student, teacher, teacher_tail, retained)
    return reverse_kl(student, floored_tail(teacher))


def student_tail(
    student: Float[Tensor, "places k"], retained: Bool[Tensor, "places k"]
) -> Float[Tensor, "places"]:
    """[places], log of the student's mass outside the retained ids."""
    lowest = torch.finfo(student.dtype).min
    # The lowest finite number, not -inf: a row that retains nothing must not differentiate to NaN.
    kept = torch.nn.functional.pad(student.masked_fill(~retained, lowest), (0, 1), value=lowest)
    log_kept = kept.logsumexp(dim=1).clamp_max(math.log1p(-TAIL_MARGIN))
    # log(1 - e^x) without cancellation (Mächler 2012): one form on either side of -ln 2.
    near_one = log_kept > -math.log(2)
    return torch.where(
        near_one,
        torch.log(-torch.expm1(torch.where(near_one, log_kept, -1.0))),
        torch.log1p(-torch.exp(torch.where(near_one, -1.0, log_kept))),
    )


def log_mass(logprobs: Float[Tensor, "places k"]) -> Float[Tensor, "places"]:
    """[places], log of the summed probabilities of each row; -inf for none."""
    return torch.nn.functional.pad(logprobs, (0, 1), value=-torch.inf).logsumexp(dim=1)
