"""Positions (or rows) of each span, flat: one entry per pair of span and position."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def span_members(
    starts: Int64[Tensor, "spans"], ends: Int64[Tensor, "spans"]
) -> tuple[Int64[Tensor, "members"], Int64[Tensor, "members"]]:
    """Every (span, position) with ``starts[span] <= position < ends[span]``, span by span.

    Args:
        starts: int64 [spans].
        ends: int64 [spans], exclusive.

    Returns:
        int64 [members] each: the span, and the position.
    """
    lengths = ends - starts
    spans = torch.repeat_interleave(torch.arange(len(starts), device=starts.device), lengths)
    first_member = lengths.cumsum(0) - lengths
    within = torch.arange(len(spans), device=starts.device) - first_member[spans]
    return spans, starts[spans] + within


def span_sums(
    values: Float[Tensor, "members *rest"], spans: Int64[Tensor, "members"], count: int
) -> Float[Tensor, "spans *rest"]:
    """[count, ...], the sum of the members' values in each span; zero for a span of none."""
    return values.new_zeros(count, *values.shape[1:]).index_add(0, spans, values)


def inside_spans(
    starts: Int64[Tensor, "spans"], ends: Int64[Tensor, "spans"], positions: int
) -> Bool[Tensor, "cuts"]:
    """bool [positions + 1] on the CPU, True at cuts between two positions of one span."""
    starts, ends = starts.cpu(), ends.cpu()
    depth = torch.zeros(positions + 1, dtype=torch.int64)
    depth.index_add_(0, starts + 1, torch.ones_like(starts))
    depth.index_add_(0, ends, -torch.ones_like(ends))
    return depth.cumsum(0) > 0
