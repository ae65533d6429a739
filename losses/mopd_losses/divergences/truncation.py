"""Three forms of a divergence that is truncated to retained ids, e.g. a teacher's top-k.

The letters are those of losses.md section 4.2; p and t are the probabilities of student and
teacher, Z and M their mass on the retained ids J.

* Form E, **tail bucket** (``with_tail_bucket``): both sides become distributions on (J, rest), for
  any divergence of ``divergences``. Coarse-graining never raises an f-divergence, so the value is a
  lower bound of the full one (except for ``adaptive_kl``); it is zero, with zero gradient, exactly
  where the student's retained probabilities equal the teacher's. (TRL's ``add_tail``, TA-OPD.)
* Form A, **renormalised**: each side's retained probabilities scaled to sum to one. Mass outside J
  has no influence: a single retained id compares nothing, and mass that the student leaks to other
  ids costs nothing. In return no tail is needed, and log-probabilities at one temperature give
  those at any other exactly, because within J they are logits. (ms-swift, ROLL, NeMo-RL.)
* Form D, **generalised** KL between masses that need not sum to one:

      forward: sum over J of [t ln(t / p) - t + p]        by the logits: p_J - t_J - p (Z - M)
      reverse: sum over J of [p ln(p / t) - p + t]

  The correction, which plain sums of ``t ln(t / p)`` over a top-k lack, makes every term
  non-negative and the sum stationary exactly where ``p = t`` on J; plain sums push the tail to zero
  (forward) or all mass into it (reverse). Never above form E, and with no tail to divide by. (MOPD,
  arXiv 2606.30406, equation 5: reverse.)
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mopd_losses.divergences.divergences import forward_kl, reverse_kl

#: Upper limit of the student's retained mass is 1 minus this; a tail clamped so is a constant.
TAIL_MARGIN = 1e-6

#: Lower limit of a tail where a divergence would grow without bound as it vanishes.
TAIL_FLOOR = 1e-4


def with_tail_bucket(
    student: Float[Tensor, "compared k"],
    teacher: Float[Tensor, "compared k"],
    teacher_tail: Float[Tensor, "compared"],
    retained: Bool[Tensor, "compared k"],
) -> tuple[Float[Tensor, "compared k+1"], Float[Tensor, "compared k+1"]]:
    """Return both sides on (retained ids, rest): log-probabilities, ``-inf`` where not retained.

    Args:
        student: [compared, k], log-probabilities; read only where ``retained``.
        teacher: [compared, k], log-probabilities; mass that is not retained is in the tail.
        teacher_tail: [compared], log of the teacher's mass outside the retained ids.
        retained: bool [compared, k].

    Returns:
        Student and teacher, [compared, k + 1] each; the last entry is the rest.
    """
    rest = student_tail(student, retained).unsqueeze(1)
    student = torch.cat([student.masked_fill(~retained, -torch.inf), rest], dim=1)
    teacher = teacher.masked_fill(~retained, -torch.inf)
    teacher = torch.cat([teacher, teacher_tail.unsqueeze(1)], dim=1)
    # Scaled to sum to one: half-precision logprobs may not quite.
    return student, teacher - teacher.logsumexp(dim=1, keepdim=True)


def floored_tail(
    other: Float[Tensor, "compared entries"], side: Float[Tensor, "compared entries"]
) -> Float[Tensor, "compared entries"]:
    """Clamp the rest of a side on (retained ids, rest) to at least ``TAIL_FLOOR``.

    For divergences without a bound where the side's probability vanishes. The floor is never
    above the other side's rest, so that the divergence of equal sides is zero.
    """
    floor = other[:, -1:].detach().clamp_max(math.log(TAIL_FLOOR))
    floored = torch.cat([side[:, :-1], side[:, -1:].maximum(floor)], dim=1)
    return floored - floored.logsumexp(dim=1, keepdim=True)


def tail_forward_kl(
    student: Float[Tensor, "compared k"],
    teacher: Float[Tensor, "compared k"],
    teacher_tail: Float[Tensor, "compared"],
    retained: Bool[Tensor, "compared k"],
) -> Float[Tensor, "compared"]:
    """[compared], ``KL(teacher || student)`` in nats; arguments as for ``with_tail_bucket``."""
    return forward_kl(*with_tail_bucket(student, teacher, teacher_tail, retained))


def tail_reverse_kl(
    student: Float[Tensor, "compared k"],
    teacher: Float[Tensor, "compared k"],
    teacher_tail: Float[Tensor, "compared"],
    retained: Bool[Tensor, "compared k"],
) -> Float[Tensor, "compared"]:
    """[compared], ``KL(student || teacher)`` in nats, with the teacher's tail floored."""
    student, teacher = with_tail_bucket(student, teacher, teacher_tail, retained)
    return reverse_kl(student, floored_tail(student, teacher))


def student_tail(
    student: Float[Tensor, "compared k"], retained: Bool[Tensor, "compared k"]
) -> Float[Tensor, "compared"]:
    """[compared], log of the student's mass outside the retained ids."""
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


def log_mass(logprobs: Float[Tensor, "compared k"]) -> Float[Tensor, "compared"]:
    """[compared], log of the summed probabilities of each row; -inf for none."""
    return torch.nn.functional.pad(logprobs, (0, 1), value=-torch.inf).logsumexp(dim=1)


def renormalised(
    logprobs: Float[Tensor, "rows k"], retained: Bool[Tensor, "rows k"]
) -> Float[Tensor, "rows k"]:
    """Return log-probabilities conditional on a retained id.

    Args:
        logprobs: [rows, k], nats, or any logits; read only where ``retained``.
        retained: bool [rows, k]; ``logprobs`` are finite where True.

    Returns:
        [rows, k], nats; ``-inf``, without a gradient, where not retained.
    """
    # The lowest finite number, not -inf: a row that retains nothing must not differentiate to NaN.
    lowest = torch.finfo(logprobs.dtype).min
    kept = torch.nn.functional.pad(logprobs.masked_fill(~retained, lowest), (0, 1), value=lowest)
    total = kept.logsumexp(dim=1, keepdim=True)
    return torch.where(retained, logprobs - total, -torch.inf)


def generalised_forward_kl(
    student: Float[Tensor, "rows k"],
    teacher: Float[Tensor, "rows k"],
    retained: Bool[Tensor, "rows k"],
) -> Float[Tensor, "rows"]:
    """[rows], ``sum of t ln(t / p) - t + p`` in nats.

    Args:
        student: [rows, k], log-probabilities; read only where ``retained``.
        teacher: [rows, k], log-probabilities.
        retained: bool [rows, k]; both sides are finite where True.
    """
    return _generalised_kl(teacher, student, retained)


def generalised_reverse_kl(
    student: Float[Tensor, "rows k"],
    teacher: Float[Tensor, "rows k"],
    retained: Bool[Tensor, "rows k"],
) -> Float[Tensor, "rows"]:
    """[rows], ``sum of p ln(p / t) - p + t`` in nats; arguments as for forward."""
    return _generalised_kl(student, teacher, retained)


def _generalised_kl(
    first: Float[Tensor, "rows k"],
    second: Float[Tensor, "rows k"],
    retained: Bool[Tensor, "rows k"],
) -> Float[Tensor, "rows"]:
    first, second = (side.masked_fill(~retained, -torch.inf) for side in (first, second))
    gaps = first.masked_fill(~retained, 0.0) - second.masked_fill(~retained, 0.0)
    return (first.exp() * gaps - first.exp() + second.exp()).sum(dim=1)
