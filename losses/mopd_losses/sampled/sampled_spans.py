"""``SampledSpans``: log-probabilities of both models for the text that the student sampled.

The probability of one token and that of several pieces together belong to different events, so what
is compared is the text of an aligned span: the product of the probabilities of its tokens on each
side. Where tokens align one to one, a span is a token. Between two vocabularies even a shared token
is not quite the same event (one side may have a longer token with these first bytes), so that two
models that agree on all texts may still differ.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.alignment.span_members import span_members, span_sums
from mopd_losses.core.compared_tokens import compared_spans
from mopd_losses.core.span_targets import SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.spans.span_likelihood import student_span_logprobs, teacher_span_logprobs


@dataclass(frozen=True, eq=False)
class SampledSpans:
    """Spans whose text has a probability on both sides; natural logs."""

    starts: Int64[Tensor, "compared"]  # positions of first tokens
    rows: Int64[Tensor, "compared"]  # teacher rows of first tokens
    student: Float[Tensor, "compared"]  # ln p(x) under the current weights; differentiable
    teacher: Float[Tensor, "compared"]  # ln t(x)
    sampled: Float[Tensor, "compared"]  # ln mu(x), under the distribution that x was drawn from
    tokens: Float[Tensor, "tokens"]  # 1 for each token of a compared span
    ruled_out: Float[Tensor, "spans"]  # 1 where a side gives a span no probability

    @property
    def log_ratios(self) -> Tensor:
        """[compared], ``d = ln p(x) - ln t(x)``; its mean over samples of ``p`` is reverse KL."""
        return self.student - self.teacher


def sampled_spans(student: StudentLogprobs, targets: SpanTargets) -> SampledSpans:
    """Compute both sides' probabilities; spans that either side rules out are skipped and
    counted."""
    current = student_span_logprobs(student, targets)
    teacher = teacher_span_logprobs(targets, current.dtype)
    spans, positions = span_members(targets.student_starts, targets.student_ends)
    sampled = targets.sampled_logprobs[positions].to(current.dtype)
    sampled = span_sums(sampled, spans, targets.spans)
    # Not isfinite: a NaN must propagate, not be skipped.
    ruled_out = torch.isneginf(current.detach()) | torch.isneginf(teacher) | torch.isneginf(sampled)
    kept = ~ruled_out
    return SampledSpans(
        targets.student_starts[kept],
        targets.teacher_starts[kept],
        current[kept],
        teacher[kept],
        sampled[kept],
        compared_spans(student, targets.student_starts, targets.student_ends, kept),
        ruled_out.to(current.dtype),
    )
