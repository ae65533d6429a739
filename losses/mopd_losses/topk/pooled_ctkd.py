"""CTKD on pooled spans: X-Token's P-KL (arXiv 2605.21699) with its faults taken out.

For a span of student positions A and teacher rows B, over the union J of the ids that the teacher
retained on B,

    Q(j) = mean over A of q(j)      q = the student's probabilities through the projection
    T(j) = mean over B of t(j)      0 where row b does not retain j: that mass is in b's tail
    any divergence on (J, rest)     rest = 1 - sum over J (form E of losses.md section 4.2)

Both means are arithmetic, so the value is never negative and is zero, with zero gradient, where
both sides agree; nothing is renormalised, no support is shared with unrelated rows, and mass on ids
that the student has no tokens for is in the tail. Single-token spans are plain ``ctkd``. In a
longer span the rows inside condition on pieces that the other side has no boundary for: an
approximation, which trains positions that ``ctkd`` does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.alignment.span_members import span_members
from mopd_losses.config import TopKDivergenceSettings
from mopd_losses.core.compared_tokens import compared_spans
from mopd_losses.core.loss import AlignedPair, LossOutput
from mopd_losses.core.segments import segment_logsumexp
from mopd_losses.core.span_targets import SpanTargets, span_targets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.core.targets import RowTargets
from mopd_losses.projection.cache import DeviceProjection
from mopd_losses.topk.pooled_entries import pooled_entries
from mopd_losses.topk.pooled_rows import PooledRows
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss
from mopd_losses.topk.topk_targets import TopKTargets
from mopd_protocol.errors import ConfigError


@dataclass(frozen=True, eq=False)
class PooledTargets(RowTargets):
    """The teacher's mean distribution over each span."""

    student_starts: Int64[Tensor, "spans"]  # positions
    student_ends: Int64[Tensor, "spans"]  # exclusive
    ids: Int64[Tensor, "spans most_ids"]  # teacher ids; -1 where missing
    logprobs: Float[Tensor, "spans most_ids"]  # nats; -inf where missing
    tail_logprobs: Float[Tensor, "spans"]  # nats


@dataclass(frozen=True, eq=False)
class PooledCtkdLoss:
    """CTKD on pooled spans: a ``Loss``.

    Raises:
        ConfigError: if ``kd_temperature`` is not the teacher's: a mean of rows has no other one.
        DataError: on call, if the student's width is not the projection's.
    """

    projection: DeviceProjection
    settings: TopKDivergenceSettings
    teacher_temperature: float = 1.0

    def __post_init__(self) -> None:
        temperature = self.settings.kd_temperature
        if temperature is not None and temperature != self.teacher_temperature:
            raise ConfigError(
                f"span_rows 'pooled': kd_temperature {temperature:g} needs a teacher that scores "
                f"at {temperature:g} (found {self.teacher_temperature:g}). Set the teacher's "
                "temperature, or use span_rows 'first'.",
                key="loss.kd_temperature",
            )

    def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> PooledTargets:
        """See ``Loss``."""
        return pooled_targets(span_targets(comparisons, offsets))

    def __call__(self, student: StudentLogprobs, targets: PooledTargets) -> LossOutput:
        """See ``Loss``; the first position of a span gets its value, ``measured`` is by span."""
        rows = PooledRows(student, targets.student_starts, targets.student_ends)
        spans = torch.arange(rows.positions, device=student.device)
        by_span = TopKTargets(spans, targets.ids, targets.logprobs, targets.tail_logprobs)
        loss = TopKDivergenceLoss(self.projection, self.settings, self.teacher_temperature)
        output = loss(rows, by_span)
        per_token = student.zeros().index_add(0, targets.student_starts, output.per_token)
        compared = compared_spans(
            student, targets.student_starts, targets.student_ends, output.compared
        )
        return LossOutput(per_token, compared, output.measured)


def pooled_targets(spans: SpanTargets) -> PooledTargets:
    """Average the teacher's rows over each span, adding entries of the same id."""
    owner, rows = span_members(spans.teacher_starts, spans.teacher_ends)
    shares = -(spans.teacher_ends - spans.teacher_starts).to(spans.topk_logprobs.dtype).log()
    logprobs = spans.topk_logprobs[rows] + shares[owner, None]
    pooled_ids, pooled_logprobs = pooled_entries(owner, spans.topk_ids[rows], logprobs, spans.spans)
    return PooledTargets(
        student_starts=spans.student_starts,
        student_ends=spans.student_ends,
        ids=pooled_ids,
        logprobs=pooled_logprobs,
        tail_logprobs=segment_logsumexp(
            spans.tail_logprobs[rows] + shares[owner], owner, spans.spans
        ),
    )
