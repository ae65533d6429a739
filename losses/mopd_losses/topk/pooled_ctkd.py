"""CTKD on pooled spans: X-Token's P-KL (arXiv 2605.21699) with its faults taken out.

For a span of student slots A and teacher rows B, over the union J of the ids that the teacher
retained on B,

    Q(j) = mean over A of q(j)      q = the student's probabilities through the projection
    T(j) = mean over B of t(j)      0 where row b does not retain j: that mass is in b's tail
    any divergence on (J, rest)     rest = 1 - sum over J (form E of losses.md section 4.2)

Both means are arithmetic, so the value is never negative and is zero, with zero gradient, where
both sides say the same; nothing is renormalised, no support is shared with unrelated rows, and what
the student cannot name is in the tail. (P-KL to the letter: ``pkl_parity``.) Single-token spans
are plain ``ctkd``. In a longer span the rows inside condition on pieces that the other side has no
boundary for: it is an approximation that trains those slots, where ``ctkd`` leaves them alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.alignment.span_members import inside_spans, span_members
from mopd_losses.config import TopKDivergenceSettings
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.loss_output import LossOutput
from mopd_losses.core.span_targets import SpanTargets, span_targets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.projection.cache import DeviceProjection
from mopd_losses.projection.projected_logprobs import segment_logsumexp
from mopd_losses.topk.pooled_rows import PooledRows
from mopd_losses.topk.topk_divergence import topk_divergence
from mopd_losses.topk.topk_targets import TopKTargets
from mopd_protocol.errors import ConfigError


@dataclass(frozen=True, eq=False)
class PooledTargets:
    """The teacher's mean distribution over each span."""

    student_starts: Int64[Tensor, "spans"]  # slots
    student_ends: Int64[Tensor, "spans"]  # exclusive
    ids: Int64[Tensor, "spans most_ids"]  # teacher ids; -1 where absent
    logprobs: Float[Tensor, "spans most_ids"]  # nats; -inf where absent
    tail_logprobs: Float[Tensor, "spans"]  # nats

    def to(self, device: torch.device | str) -> "PooledTargets":
        """See ``Targets``."""
        return PooledTargets(
            self.student_starts.to(device),
            self.student_ends.to(device),
            self.ids.to(device),
            self.logprobs.to(device),
            self.tail_logprobs.to(device),
        )

    def between(self, start: int, stop: int) -> "PooledTargets":
        """See ``Targets``."""
        bounds = self.student_starts.new_tensor([start, stop])
        first, last = torch.searchsorted(self.student_starts, bounds).tolist()
        return PooledTargets(
            self.student_starts[first:last] - start,
            self.student_ends[first:last] - start,
            self.ids[first:last],
            self.logprobs[first:last],
            self.tail_logprobs[first:last],
        )

    def uncuttable(self, slots: int) -> Tensor:
        """See ``Targets``: a block may not end inside a span."""
        return inside_spans(self.student_starts, self.student_ends, slots)


@dataclass(frozen=True, eq=False)
class PooledCtkdLoss:
    """``pooled_ctkd`` with its settings: a ``Loss``.

    Raises:
        ConfigError: when the settings want another temperature than the teacher scored at: means
            of rows cannot be warmed after the fact.
    """

    projection: DeviceProjection
    settings: TopKDivergenceSettings
    teacher_temperature: float = 1.0  # that the teacher scored at

    def __post_init__(self) -> None:
        wanted = self.settings.kd_temperature
        if wanted is not None and wanted != self.teacher_temperature:
            raise ConfigError(
                f"span_rows 'pooled' at kd_temperature {wanted:g} needs a teacher that scored at "
                f"{wanted:g}, but this one scored at {self.teacher_temperature:g}; set the "
                "teacher's temperature, or use span_rows 'first'"
            )

    def targets(
        self, comparisons: Sequence[AlignedPair], slot_offsets: Sequence[int]
    ) -> PooledTargets:
        """See ``Loss``."""
        return pooled_targets(span_targets(comparisons, slot_offsets))

    def __call__(self, student: StudentLogprobs, targets: PooledTargets) -> LossOutput:
        """See ``Loss``."""
        return pooled_ctkd(
            student,
            targets,
            self.projection,
            self.settings,
            teacher_temperature=self.teacher_temperature,
        )


def pooled_targets(spans: SpanTargets) -> PooledTargets:
    """The teacher's rows averaged over each span, entries of one id added up."""
    owner, rows = span_members(spans.teacher_starts, spans.teacher_ends)
    shares = -(spans.teacher_ends - spans.teacher_starts).to(spans.topk_logprobs.dtype).log()
    ids, logprobs = spans.topk_ids[rows], spans.topk_logprobs[rows] + shares[owner, None]
    present = ids >= 0
    size = int(ids.max()) + 1 if present.any() else 1
    keys, entry = (owner[:, None] * size + ids)[present].unique(return_inverse=True)
    masses = segment_logsumexp(logprobs[present], entry, len(keys))
    span = keys // size
    counts = torch.bincount(span, minlength=spans.spans)
    column = torch.arange(len(keys), device=keys.device) - (counts.cumsum(0) - counts)[span]
    shape = (spans.spans, int(counts.max()) if len(keys) else 0)
    pooled_ids = torch.full(shape, -1, dtype=torch.int64, device=keys.device)
    pooled_logprobs = torch.full(shape, -torch.inf, dtype=masses.dtype, device=keys.device)
    pooled_ids[span, column] = keys % size
    pooled_logprobs[span, column] = masses
    return PooledTargets(
        student_starts=spans.student_starts,
        student_ends=spans.student_ends,
        ids=pooled_ids,
        logprobs=pooled_logprobs,
        tail_logprobs=segment_logsumexp(
            spans.tail_logprobs[rows] + shares[owner], owner, spans.spans
        ),
    )


def pooled_ctkd(
    student: StudentLogprobs,
    targets: PooledTargets,
    projection: DeviceProjection,
    settings: TopKDivergenceSettings,
    *,
    teacher_temperature: float = 1.0,
) -> LossOutput:
    """Nats per student token; a span's divergence stands at the span's first token.

    Args:
        targets: the teacher over each span.
        projection: student ids -> teacher ids, on the student's device.
        teacher_temperature: that ``targets`` were made at.

    Returns:
        ``measured`` as for ``topk_divergence``, one value a span.

    Raises:
        DataError: when the student's width is not the projection's.
    """
    rows = PooledRows(student, targets.student_starts, targets.student_ends)
    spans = torch.arange(rows.slots, device=student.device)
    at_spans = TopKTargets(spans, targets.ids, targets.logprobs, targets.tail_logprobs)
    output = topk_divergence(
        rows, at_spans, projection, settings, teacher_temperature=teacher_temperature
    )
    per_token = student.zeros().index_add(0, targets.student_starts, output.per_token)
    return LossOutput(per_token, output.measured)
