"""Log-probability of the full text of a span on each side, in that side's tokens."""

import torch
from jaxtyping import Float
from torch import Tensor

from mopd_losses.alignment.span_members import span_members, span_sums
from mopd_losses.core.span_targets import SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs


def student_span_logprobs(student: StudentLogprobs, targets: SpanTargets) -> Float[Tensor, "spans"]:
    """[spans], the sum of ``ln p(token)`` over a span's student tokens; nats, differentiable.

    ``-inf`` where the student rules out one of its tokens.
    """
    spans, positions = span_members(targets.student_starts, targets.student_ends)
    read = student.logprobs(positions, targets.labels[positions])
    return span_sums(read, spans, targets.spans)


def teacher_span_logprobs(targets: SpanTargets, dtype: torch.dtype) -> Float[Tensor, "spans"]:
    """[spans], the same sum over the teacher's tokens of the span."""
    spans, rows = span_members(targets.teacher_starts, targets.teacher_ends)
    return span_sums(targets.token_logprobs[rows].to(dtype), spans, targets.spans)
