"""``SupportTargets``: a teacher's log-probabilities of one set of ids, the same at every row.

X-Token's losses compare all spans of a micro-batch on one support, chosen once from all its rows.
That couples unrelated rows (a micro-batch's split changes the loss), and exists for comparison.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.core.span_targets import SpanTargets
from mopd_losses.core.targets import RowTargets

#: Lower limit of a missing id's logprob, for rows in which the teacher sent almost every id.
_LEAST_LOGPROB = math.log(1e-10)


@dataclass(frozen=True, eq=False)
class SupportTargets(RowTargets):
    """Spans, and the teacher's rows on the support."""

    student_starts: Int64[Tensor, "spans"]  # positions
    student_ends: Int64[Tensor, "spans"]  # exclusive
    teacher_starts: Int64[Tensor, "spans"]  # rows
    teacher_ends: Int64[Tensor, "spans"]  # exclusive
    support: Int64[Tensor, "ids"]  # increasing
    logprobs: Float[Tensor, "rows ids"]  # nats, over the teacher's full vocabulary

    @property
    def shared(self) -> tuple[str, ...]:
        """The support and the teacher's rows; spans contain row numbers."""
        return ("support", "logprobs")


def topk_support(
    spans: SpanTargets, teacher_size: int, *, most_ids: int | None = None
) -> SupportTargets:
    """Build targets on the union of all rows' top-k ids, or on the most likely ids of any row.

    Each id that a row did not send gets an equal share of that row's tail.

    Args:
        teacher_size: the teacher's ids, for the number that share a tail.
        most_ids: the largest support; None for all ids that were sent.
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
    return SupportTargets(
        student_starts=spans.student_starts,
        student_ends=spans.student_ends,
        teacher_starts=spans.teacher_starts,
        teacher_ends=spans.teacher_ends,
        support=support,
        logprobs=logprobs,
    )
