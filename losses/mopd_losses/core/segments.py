"""Sums over segments and ranges of unequal length."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def segment_logsumexp(
    terms: Float[Tensor, "n"], segments: Int64[Tensor, "n"], count: int
) -> Float[Tensor, "segments"]:
    """[count], the log-sum-exp of the terms of each segment; ``-inf``, without a gradient, of none.

    Args:
        terms: [n], logs.
        segments: int64 [n], the segment of each term.
    """
    # The maximum is a constant of the gradient.
    peaks = torch.full((count,), -torch.inf, dtype=terms.dtype, device=terms.device)
    peaks = peaks.scatter_reduce(0, segments, terms.detach(), "amax")
    reached = ~torch.isneginf(peaks)  # also not where every term is -inf
    shifts = torch.where(reached, peaks, 0.0)
    sums = torch.zeros_like(peaks).index_add(0, segments, (terms - shifts[segments]).exp())
    # log(1) where nothing was summed: log(0) there would send NaN back through the graph.
    return torch.where(reached, sums, 1.0).log() + peaks


def expand_ranges(
    starts: Int64[Tensor, "n"], stops: Int64[Tensor, "n"]
) -> tuple[Int64[Tensor, "members"], Int64[Tensor, "members"]]:
    """Return the number of the range and the member, for all members of ``[start, stop)``."""
    counts = stops - starts
    numbers = torch.repeat_interleave(counts)
    shifts = starts - (counts.cumsum(0) - counts)
    return numbers, torch.arange(len(numbers), device=starts.device) + shifts[numbers]
