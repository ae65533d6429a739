"""Merge the rows of a span into one vector, for GOLD and ULD.

``bayesian``: the last row of the span, times the probability of every token before it: the joint
probability of "the tokens so far, then v", by the chain rule. Its mass is the probability of the
tokens so far.

``observed``: what TRL's GOLD does by default, for comparison with it. All rows are one later than
the tokens (the first token is never read), the first row is kept, and the factors are the
probabilities of each token under the row *after* it, so the product is of no event
(https://github.com/huggingface/trl/issues/5152). The last span of a completion is skipped, as no
row follows it. A teacher's row that does not retain the token has the lowest factor for it.

Factors are clamped to at least 1e-8, as in TRL. (losses.md sections 2.3 to 2.5.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.alignment.span_members import span_members, span_sums
from mopd_losses.config import Merge
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.span_targets import SpanTargets, span_targets
from mopd_losses.core.student_rows import StudentLogprobs

LEAST_FACTOR = math.log(1e-8)


@dataclass(frozen=True, eq=False)
class MergedSpans:
    """The row that is kept of each span, and the log of the factor that multiplies the row."""

    positions: Int64[Tensor, "spans"]  # student
    log_factors: Float[Tensor, "spans"]  # nats; differentiable
    rows: Int64[Tensor, "spans"]  # teacher
    teacher_log_factors: Float[Tensor, "spans"]  # nats


def mergeable_targets(
    comparisons: Sequence[AlignedPair], offsets: Sequence[int], merge: Merge
) -> SpanTargets:
    """Build the spans for a merge.

    ``bayesian``: unchanged. ``observed``: shifted by one position and one row, with labels, teacher
    ids and token logprobs of the token before; positions and rows stay consistent, and a span's
    value is at the first position that it reads.
    """
    targets = span_targets(comparisons, offsets)
    if merge == "bayesian":
        return targets
    student_ends: list[int] = []
    teacher_ends: list[int] = []
    rows = 0
    for comparison, offset in zip(comparisons, offsets, strict=True):
        rows += len(comparison.score.completion)
        student_ends += [offset + len(comparison.student)] * len(comparison.alignment)
        teacher_ends += [rows] * len(comparison.alignment)
    has_next = (targets.student_ends < torch.tensor(student_ends, dtype=torch.int64)) & (
        targets.teacher_ends < torch.tensor(teacher_ends, dtype=torch.int64)
    )
    before = targets.teacher_ids.roll(1)
    is_before = (targets.topk_ids == before[:, None]) & (targets.topk_ids >= 0)
    return replace(
        targets,
        student_starts=targets.student_starts[has_next] + 1,
        student_ends=targets.student_ends[has_next] + 1,
        teacher_starts=targets.teacher_starts[has_next] + 1,
        teacher_ends=targets.teacher_ends[has_next] + 1,
        span_bytes=targets.span_bytes[has_next],
        labels=targets.labels.roll(1),
        teacher_ids=before,
        token_logprobs=targets.topk_logprobs.masked_fill(~is_before, -torch.inf).logsumexp(dim=1)
        if targets.topk_ids.shape[1]
        else torch.full_like(targets.token_logprobs, -torch.inf),
    )


def merged_spans(student: StudentLogprobs, targets: SpanTargets, merge: Merge) -> MergedSpans:
    """Select the row of each span that is kept, and multiply the factors of the other rows."""
    if merge == "bayesian":
        kept, skip_first, skip_last = -1, 0, 1
    else:
        kept, skip_first, skip_last = 0, 1, 0
    spans, positions = span_members(
        targets.student_starts + skip_first, targets.student_ends - skip_last
    )
    logprobs = student.logprobs(positions, targets.labels[positions]).clamp_min(LEAST_FACTOR)
    teacher_spans, rows = span_members(
        targets.teacher_starts + skip_first, targets.teacher_ends - skip_last
    )
    teacher = targets.token_logprobs[rows].to(student.dtype).clamp_min(LEAST_FACTOR)
    return MergedSpans(
        positions=targets.student_starts if kept == 0 else targets.student_ends - 1,
        log_factors=span_sums(logprobs, spans, targets.spans),
        rows=targets.teacher_starts if kept == 0 else targets.teacher_ends - 1,
        teacher_log_factors=span_sums(teacher, teacher_spans, targets.spans),
    )
