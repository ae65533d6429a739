"""``SpanTargets``: aligned spans with everything that a teacher said about them.

For losses that look at whole spans: the likelihood of a span, rows merged over a span, rows
averaged over it. Losses on the first row of a span alone use the leaner ``TopKTargets``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.alignment.span_members import inside_spans
from mopd_losses.core.loss import AlignedPair


@dataclass(frozen=True, eq=False)
class SpanTargets:
    """Spans of several completions, in order; rows of all their teacher tokens.

    Slots count the micro-batch's student tokens, rows its teacher tokens. Absent entries of a
    top-k are id ``-1`` with ``-inf``.
    """

    student_starts: Int64[Tensor, "spans"]  # slots
    student_ends: Int64[Tensor, "spans"]  # exclusive
    teacher_starts: Int64[Tensor, "spans"]  # rows
    teacher_ends: Int64[Tensor, "spans"]  # exclusive
    span_bytes: Int64[Tensor, "spans"]  # 0 for a control token
    labels: Int64[Tensor, "slots"]  # the student's own tokens; -1 where no span can be
    #: nats; NaN where no span can be, and where the student did not write it
    sampled_logprobs: Float[Tensor, "slots"]
    teacher_ids: Int64[Tensor, "rows"]  # the teacher's own tokens
    token_logprobs: Float[Tensor, "rows"]  # nats: the teacher's, of its own tokens
    topk_ids: Int64[Tensor, "rows k"]
    topk_logprobs: Float[Tensor, "rows k"]  # nats
    tail_logprobs: Float[Tensor, "rows"]  # nats

    @property
    def spans(self) -> int:
        """Aligned spans."""
        return len(self.student_starts)

    def to(self, device: torch.device | str) -> "SpanTargets":
        """See ``Targets``."""
        return SpanTargets(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def between(self, start: int, stop: int) -> "SpanTargets":
        """See ``Targets``. Teacher rows stay whole: spans name them by number."""
        bounds = self.student_starts.new_tensor([start, stop])
        first, last = torch.searchsorted(self.student_starts, bounds).tolist()
        spans = slice(first, last)
        return replace(
            self,
            student_starts=self.student_starts[spans] - start,
            student_ends=self.student_ends[spans] - start,
            teacher_starts=self.teacher_starts[spans],
            teacher_ends=self.teacher_ends[spans],
            span_bytes=self.span_bytes[spans],
            labels=self.labels[start:stop],
            sampled_logprobs=self.sampled_logprobs[start:stop],
        )

    def uncuttable(self, slots: int) -> Tensor:
        """See ``Targets``: a block may not end inside a span."""
        return inside_spans(self.student_starts, self.student_ends, slots)


def span_targets(comparisons: Sequence[AlignedPair], slot_offsets: Sequence[int]) -> SpanTargets:
    """The targets of several completions, whose slots may have others' between them."""
    k = max((comparison.score.topk.k for comparison in comparisons), default=0)
    rows = [len(comparison.score.completion) for comparison in comparisons]
    row_offsets = list(accumulate(rows, initial=0))[:-1]

    def spans(name: str, offsets: Sequence[int]) -> Tensor:
        parts = [
            getattr(comparison.alignment, name).astype(np.int64) + offset
            for comparison, offset in zip(comparisons, offsets, strict=True)
        ]
        return torch.tensor(np.concatenate([np.zeros(0, np.int64), *parts]))

    def column(values: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.tensor(np.concatenate([np.zeros(0), *values]), dtype=dtype)

    def by_slot(values: Sequence[np.ndarray], fill: float, dtype: torch.dtype) -> Tensor:
        # Between two completions may stand one that this teacher did not judge.
        ends = [offset + len(value) for value, offset in zip(values, slot_offsets, strict=True)]
        column = torch.full((max(ends, default=0),), fill, dtype=dtype)
        for value, start, end in zip(values, slot_offsets, ends, strict=True):
            column[start:end] = torch.tensor(value, dtype=dtype)
        return column

    def widened(values: Sequence[np.ndarray], fill: float, dtype: torch.dtype) -> Tensor:
        parts = [
            np.pad(value, ((0, 0), (0, k - value.shape[1])), constant_values=fill)
            for value in values
        ]
        return torch.tensor(np.concatenate([np.zeros((0, k)), *parts]), dtype=dtype)

    topks = [comparison.score.topk for comparison in comparisons]
    return SpanTargets(
        student_starts=spans("student_starts", slot_offsets),
        student_ends=spans("student_ends", slot_offsets),
        teacher_starts=spans("teacher_starts", row_offsets),
        teacher_ends=spans("teacher_ends", row_offsets),
        span_bytes=column([_span_bytes(c) for c in comparisons], torch.int64),
        labels=by_slot([c.student.token_ids for c in comparisons], -1, torch.int64),
        sampled_logprobs=by_slot(
            [_sampled_logprobs(c) for c in comparisons], torch.nan, torch.float32
        ),
        teacher_ids=column([c.score.completion.token_ids for c in comparisons], torch.int64),
        token_logprobs=column([topk.token_logprobs for topk in topks], torch.float32),
        topk_ids=widened([topk.ids for topk in topks], -1, torch.int64),
        topk_logprobs=widened([topk.logprobs for topk in topks], -np.inf, torch.float32),
        tail_logprobs=column([topk.tail_logprobs for topk in topks], torch.float32),
    )


def _sampled_logprobs(comparison: AlignedPair) -> np.ndarray:
    if comparison.sampled_logprobs is None:
        return np.full(len(comparison.student), np.nan, dtype=np.float32)
    return comparison.sampled_logprobs


def _span_bytes(comparison: AlignedPair) -> np.ndarray:
    ends = np.concatenate([[0], comparison.student.byte_ends])
    return ends[comparison.alignment.student_ends] - ends[comparison.alignment.student_starts]
