"""Tokens that a loss has compared with the teacher, for ``LossOutput.compared``."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mopd_losses.alignment.span_members import span_members
from mopd_losses.core.student_rows import StudentLogprobs


def compared_positions(
    student: StudentLogprobs,
    positions: Int64[Tensor, "n"],
    shares: Float[Tensor, "n"] | Bool[Tensor, "n"] | None = None,
) -> Float[Tensor, "tokens"]:
    """Return [tokens], the largest share of each position; zero for all others.

    Args:
        positions: int64 [n]; a position may occur several times.
        shares: [n], from 0 to 1; default: 1.
    """
    tokens = torch.zeros(student.positions, dtype=student.dtype, device=student.device)
    if shares is None:
        shares = torch.ones_like(positions, dtype=tokens.dtype)
    return tokens.scatter_reduce(0, positions, shares.detach().to(tokens.dtype), "amax")


def compared_spans(
    student: StudentLogprobs,
    starts: Int64[Tensor, "spans"],
    ends: Int64[Tensor, "spans"],
    shares: Float[Tensor, "spans"] | Bool[Tensor, "spans"] | None = None,
) -> Float[Tensor, "tokens"]:
    """Return [tokens], the share of each token's span; zero outside of spans.

    Args:
        starts: int64 [spans], positions.
        ends: int64 [spans], exclusive.
        shares: [spans], from 0 to 1; default: 1.
    """
    spans, positions = span_members(starts, ends)
    return compared_positions(student, positions, None if shares is None else shares[spans])
