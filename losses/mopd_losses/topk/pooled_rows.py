"""``PooledRows``: a student whose positions are spans, with mean distributions."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mopd_losses.alignment.span_members import span_members
from mopd_losses.core.segments import segment_logsumexp
from mopd_losses.core.student_rows import DerivedRows, StudentLogprobs, range_logmasses


class PooledRows(DerivedRows):
    """``p(span)``, the arithmetic mean of the probabilities at the positions of the span.

    A projection is linear, so the projection of the mean is the mean of projections: a loss on
    single rows applied to ``PooledRows`` is the loss on pooled spans.

    Args:
        starts: int64 [spans], positions of ``student``.
        ends: int64 [spans], exclusive.
    """

    def __init__(
        self, student: StudentLogprobs, starts: Int64[Tensor, "spans"], ends: Int64[Tensor, "spans"]
    ) -> None:
        super().__init__(student)
        self._starts = starts
        self._ends = ends

    @property
    def positions(self) -> int:
        """Number of spans."""
        return len(self._starts)

    def logprobs(
        self, positions: Int64[Tensor, "n"], ids: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n"]:
        """See ``StudentLogprobs``; ``-inf``, with no gradient, if all positions of a span are."""
        starts, ends = self._starts[positions], self._ends[positions]
        pairs, members = span_members(starts, ends)
        logprobs = self._student.logprobs(members, ids[pairs], temperature=temperature)
        lengths = (ends - starts).to(self.dtype)
        return segment_logsumexp(logprobs, pairs, len(positions)) - lengths.log()

    def range_logmasses(
        self,
        positions: Int64[Tensor, "n"],
        starts: Int64[Tensor, "n"],
        stops: Int64[Tensor, "n"],
        ids: Int64[Tensor, "m"],
        *,
        temperature: float = 1.0,
    ) -> Float[Tensor, "n"]:
        """See ``StudentLogprobs``."""
        return range_logmasses(self, positions, starts, stops, ids, temperature=temperature)

    def whole_rows(
        self, positions: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n width"]:
        """See ``StudentLogprobs``."""
        ids = torch.arange(self.width, device=self.device).repeat(len(positions))
        read = self.logprobs(positions.repeat_interleave(self.width), ids, temperature=temperature)
        return read.view(len(positions), self.width)

    def zeros(self) -> Float[Tensor, "positions"]:
        """See ``StudentLogprobs``."""
        return self._student.zeros()[self._starts]

    def most_likely_ids(
        self, positions: Int64[Tensor, "n"], allowed: Bool[Tensor, "width"], count: int
    ) -> Int64[Tensor, "n most"]:
        """See ``StudentLogprobs``; reads every allowed id, as no row is ordered like a mean."""
        (ids,) = allowed.nonzero(as_tuple=True)
        with torch.no_grad():
            means = self.logprobs(positions.repeat_interleave(len(ids)), ids.repeat(len(positions)))
        values, order = means.view(len(positions), len(ids)).topk(min(count, len(ids)), dim=1)
        return ids[order].masked_fill_(torch.isneginf(values), -1)
