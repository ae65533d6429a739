"""``PooledRows``: a student whose slots are spans, each the mean of its tokens' distributions."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mopd_losses.alignment.span_members import span_members
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.projection.projected_logprobs import segment_logsumexp


class PooledRows:
    """``p(span) = mean over the span's slots of p(slot)``: an arithmetic mean of probabilities.

    A projection is linear, so the projection of the mean is the mean of projections, and a loss on
    single rows becomes one on pooled spans by being given these.

    Args:
        starts: int64 [spans], slots of ``student``.
        ends: int64 [spans], exclusive.
    """

    def __init__(
        self, student: StudentLogprobs, starts: Int64[Tensor, "spans"], ends: Int64[Tensor, "spans"]
    ) -> None:
        self._student = student
        self._starts = starts
        self._ends = ends

    @property
    def slots(self) -> int:
        """See ``StudentLogprobs``; here, spans."""
        return len(self._starts)

    @property
    def width(self) -> int:
        """See ``StudentLogprobs``."""
        return self._student.width

    @property
    def device(self) -> torch.device:
        """See ``StudentLogprobs``."""
        return self._student.device

    @property
    def dtype(self) -> torch.dtype:
        """See ``StudentLogprobs``."""
        return self._student.dtype

    def logprobs(
        self, slots: Int64[Tensor, "n"], ids: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n"]:
        """See ``StudentLogprobs``; ``-inf``, with no gradient, if all slots of a span are."""
        starts, ends = self._starts[slots], self._ends[slots]
        asked, members = span_members(starts, ends)
        read = self._student.logprobs(members, ids[asked], temperature=temperature)
        lengths = (ends - starts).to(self.dtype)
        return segment_logsumexp(read, asked, len(slots)) - lengths.log()

    def whole_rows(
        self, slots: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n width"]:
        """See ``StudentLogprobs``."""
        ids = torch.arange(self.width, device=self.device).repeat(len(slots))
        read = self.logprobs(slots.repeat_interleave(self.width), ids, temperature=temperature)
        return read.view(len(slots), self.width)

    def zeros(self) -> Float[Tensor, "slots"]:
        """See ``StudentLogprobs``."""
        return self._student.zeros()[self._starts]

    def most_likely_ids(
        self, slots: Int64[Tensor, "n"], allowed: Bool[Tensor, "width"], count: int
    ) -> Int64[Tensor, "n most"]:
        """See ``StudentLogprobs``; reads every allowed id: no row has the order of a mean."""
        (ids,) = allowed.nonzero(as_tuple=True)
        with torch.no_grad():
            means = self.logprobs(slots.repeat_interleave(len(ids)), ids.repeat(len(slots)))
        values, order = means.view(len(slots), len(ids)).topk(min(count, len(ids)), dim=1)
        return ids[order].masked_fill_(torch.isneginf(values), -1)
