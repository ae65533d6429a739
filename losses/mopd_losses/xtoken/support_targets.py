"""``SupportTargets``: a teacher's log-probabilities of one set of ids, the same at every row.

X-Token's losses compare all spans of a micro-batch on one support, chosen once from all its rows.
That couples unrelated rows (a micro-batch's split changes the loss), and exists for comparison.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.alignment.span_members import inside_spans
from mopd_losses.core.span_targets import SpanTargets

#: Where a teacher sent every id but one is absent all the same: the least that it may weigh.
_LEAST_LOGPROB = math.log(1e-10)


@dataclass(frozen=True, eq=False)
class SupportTargets:
    """Spans, and the teacher's rows on the support."""

    student_starts: Int64[Tensor, "spans"]  # slots
    student_ends: Int64[Tensor, "spans"]  # exclusive
    teacher_starts: Int64[Tensor, "spans"]  # rows
    teacher_ends: Int64[Tensor, "spans"]  # exclusive
    support: Int64[Tensor, "ids"]  # increasing
    logprobs: Float[Tensor, "rows ids"]  # nats, over the teacher's whole vocabulary

    def to(self, device: torch.device | str) -> "SupportTargets":
        """See ``Targets``."""
        return SupportTargets(
            self.student_starts.to(device),
            self.student_ends.to(device),
            self.teacher_starts.to(device),
            self.teacher_ends.to(device),
            self.support.to(device),
            self.logprobs.to(device),
        )

    def between(self, start: int, stop: int) -> "SupportTargets":
        """See ``Targets``. Teacher rows stay whole: spans name them by number."""
        bounds = self.student_starts.new_tensor([start, stop])
        first, last = torch.searchsorted(self.student_starts, bounds).tolist()
        return replace(
            self,
            student_starts=self.student_starts[first:last] - start,
            student_ends=self.student_ends[first:last] - start,
            teacher_starts=self.teacher_starts[first:last],
            teacher_ends=self.teacher_ends[first:last],
        )

    def uncuttable(self, slots: int) -> Tensor:
        """See ``Targets``: a block may not end inside a span."""
        return inside_spans(self.student_starts, self.student_ends, slots)


def topk_support(
    spans: SpanTargets, teacher_size: int, *, most_ids: int | None = None
) -> SupportTargets:
    """The union of all rows' top-k ids, or those that are the most likely in any row.

    An id that a row did not send gets an equal share of that row's tail.

    Args:
        teacher_size: the teacher's ids, for the number that share a tail.
        most_ids: the largest support; none for all that was sent.
    """
    present = spans.topk_ids >= 0
    support, entry = spans.topk_ids[present].unique(return_inverse=True)
    column = torch.arange(len(support), device=support.device)
    if most_ids is not None and most_ids < len(support):
        peaks = spans.topk_logprobs.new_full((len(support),), -torch.inf)
        peaks = peaks.scatter_reduce(0, entry, spans.topk_logprobs[present], "amax")
        chosen = peaks.topk(most_ids).indices.sort().values
        column = torch.full_like(column, -1)
        column[chosen] = torch.arange(most_ids, device=support.device)
        support = support[chosen]
    unsent = (teacher_size - present.sum(dim=1)).clamp_min(1).to(spans.tail_logprobs.dtype)
    share = (spans.tail_logprobs - unsent.log()).clamp_min(_LEAST_LOGPROB)
    logprobs = share[:, None].repeat(1, len(support))
    kept = column[entry] >= 0
    rows = present.nonzero(as_tuple=True)[0][kept]
    logprobs[rows, column[entry][kept]] = spans.topk_logprobs[present][kept]
    return _on(spans, support, logprobs)


def full_support(
    spans: SpanTargets,
    teacher_logits: Tensor,
    *,
    most_ids: int | None = None,
    temperature: float = 1.0,
) -> SupportTargets:
    """The ids with the largest logit in any row (X-Token's choice), or all.

    Args:
        teacher_logits: [rows, teacher size], of the teacher tokens that ``spans`` counts, cut to
            the teacher's ids.
    """
    width = teacher_logits.shape[1]
    logits = teacher_logits if teacher_logits.dtype == torch.float64 else teacher_logits.float()
    support = torch.arange(width, device=logits.device)
    if most_ids is not None and most_ids < width and len(logits):
        support = logits.amax(dim=0).topk(most_ids).indices.sort().values
    return _on(spans, support, (logits / temperature).log_softmax(dim=1)[:, support])


def _on(spans: SpanTargets, support: Tensor, logprobs: Tensor) -> SupportTargets:
    return SupportTargets(
        student_starts=spans.student_starts,
        student_ends=spans.student_ends,
        teacher_starts=spans.teacher_starts,
        teacher_ends=spans.teacher_ends,
        support=support,
        logprobs=logprobs,
    )
