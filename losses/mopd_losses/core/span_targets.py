"""``SpanTargets``: aligned spans with all of a teacher's scores.

For losses that read complete spans: the likelihood of a span, rows merged or averaged over a span.
Losses on the first row of a span use the smaller ``TopKTargets``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.targets import RowTargets


@dataclass(frozen=True, eq=False)
class SpanTargets(RowTargets):
    """Spans of several completions, in order; rows of all their teacher tokens.

    Positions count the micro-batch's student tokens, rows its teacher tokens. Missing entries of a
    top-k are id ``-1`` with ``-inf``.
    """

    student_starts: Int64[Tensor, "spans"]  # positions
    student_ends: Int64[Tensor, "spans"]  # exclusive
    teacher_starts: Int64[Tensor, "spans"]  # rows
    teacher_ends: Int64[Tensor, "spans"]  # exclusive
    span_bytes: Int64[Tensor, "spans"]  # 0 for a control token
    labels: Int64[Tensor, "positions"]  # student tokens; -1 outside of the completions
    #: nats; NaN outside of the completions and in completions that were not sampled
    sampled_logprobs: Float[Tensor, "positions"]
    teacher_ids: Int64[Tensor, "rows"]  # tokens of the completion as the teacher tokenizes it
    token_logprobs: Float[Tensor, "rows"]  # nats, of ``teacher_ids``
    topk_ids: Int64[Tensor, "rows k"]
    topk_logprobs: Float[Tensor, "rows k"]  # nats
    tail_logprobs: Float[Tensor, "rows"]  # nats

    @property
    def spans(self) -> int:
        """Number of aligned spans."""
        return len(self.student_starts)

    @property
    def shared(self) -> tuple[str, ...]:
        """Columns by position or by teacher row; spans contain row numbers."""
        by_row = ("teacher_ids", "token_logprobs", "topk_ids", "topk_logprobs", "tail_logprobs")
        return ("labels", "sampled_logprobs", *by_row)

    def between(self, start: int, stop: int) -> "SpanTargets":
        """See ``Targets``. Teacher rows are not cut: spans contain their numbers."""
        return replace(
            super().between(start, stop),
            labels=self.labels[start:stop],
            sampled_logprobs=self.sampled_logprobs[start:stop],
        )


def span_targets(comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> SpanTargets:
    """Build the targets of several completions; other completions may be between them."""
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

    def by_position(values: Sequence[np.ndarray], fill: float, dtype: torch.dtype) -> Tensor:
        # A completion that this teacher did not score may be between two that it did.
        ends = [offset + len(value) for value, offset in zip(values, offsets, strict=True)]
        column = torch.full((max(ends, default=0),), fill, dtype=dtype)
        for value, start, end in zip(values, offsets, ends, strict=True):
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
        student_starts=spans("student_starts", offsets),
        student_ends=spans("student_ends", offsets),
        teacher_starts=spans("teacher_starts", row_offsets),
        teacher_ends=spans("teacher_ends", row_offsets),
        span_bytes=column([_span_bytes(c) for c in comparisons], torch.int64),
        labels=by_position([c.student.token_ids for c in comparisons], -1, torch.int64),
        sampled_logprobs=by_position(
            [_sampled_logprobs(c) for c in comparisons], torch.nan, torch.float32
        ),
        teacher_ids=column([c.score.completion.token_ids for c in comparisons], torch.int64),
        token_logprobs=column([topk.token_logprobs for topk in topks], torch.float32),
        topk_ids=widened([topk.ids for topk in topks], -1, torch.int64),
        topk_logprobs=widened([topk.logprobs for topk in topks], -np.inf, torch.float32),
        tail_logprobs=column([topk.tail_logprobs for topk in topks], torch.float32),
    )


class SpanLoss:
    """Base of losses on ``SpanTargets``."""

    def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> SpanTargets:
        """See ``Loss``."""
        return span_targets(comparisons, offsets)


def _sampled_logprobs(comparison: AlignedPair) -> np.ndarray:
    if comparison.sampled_logprobs is None:
        return np.full(len(comparison.student), np.nan, dtype=np.float32)
    return comparison.sampled_logprobs


def _span_bytes(comparison: AlignedPair) -> np.ndarray:
    ends = np.concatenate([[0], comparison.student.byte_ends])
    return ends[comparison.alignment.student_ends] - ends[comparison.alignment.student_starts]
