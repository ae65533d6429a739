"""Form D of a truncated divergence: KL between masses that need not sum to one.

    forward: sum over J of [t ln(t / p) - t + p]        by the logits: p_J - t_J - p (Z - M)
    reverse: sum over J of [p ln(p / t) - p + t]

with M and Z the two sides' mass on the retained ids J. The correction, absent from plain sums of
``t ln(t / p)`` over a top-k, makes every term non-negative and the sum stationary exactly where
``p = t`` on J; plain sums push the tail to nothing (forward) or all mass into it (reverse). Never
above form E, and with no tail to divide by. (MOPD, arXiv 2606.30406, equation 5: reverse.)
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def generalised_forward_kl(
    student: Float[Tensor, "rows k"],
    teacher: Float[Tensor, "rows k"],
    retained: Bool[Tensor, "rows k"],
) -> Float[Tensor, "rows"]:
    """``sum of t ln(t / p) - t + p``, in nats.

    Args:
        student: [rows, k], log-probabilities; read only where ``retained``.
        teacher: [rows, k], log-probabilities.
        retained: bool [rows, k]; both sides are finite wherever it holds.

    Returns:
        [rows].
    """
    return _generalised_kl(teacher, student, retained)


def generalised_reverse_kl(
    student: Float[Tensor, "rows k"],
    teacher: Float[Tensor, "rows k"],
    retained: Bool[Tensor, "rows k"],
) -> Float[Tensor, "rows"]:
    """``sum of p ln(p / t) - p + t``, in nats; arguments as for forward."""
    return _generalised_kl(student, teacher, retained)


def _generalised_kl(
    first: Float[Tensor, "rows k"],
    second: Float[Tensor, "rows k"],
    retained: Bool[Tensor, "rows k"],
) -> Float[Tensor, "rows"]:
    first, second = (side.masked_fill(~retained, -torch.inf) for side in (first, second))
    gaps = first.masked_fill(~retained, 0.0) - second.masked_fill(~retained, 0.0)
    return (first.exp() * gaps - first.exp() + second.exp()).sum(dim=1)
