"""The student's log-probability of teacher ids, through a projection, without a dense product."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.core.segments import segment_logsumexp
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.projection.cache import DeviceProjection


def projected_logprobs(
    student: StudentLogprobs,
    positions: Int64[Tensor, "compared"],
    teacher_ids: Int64[Tensor, "compared k"],
    projection: DeviceProjection,
    *,
    temperature: float = 1.0,
) -> Float[Tensor, "compared k"]:
    """``ln q(j) = logsumexp over v of (ln W[v, j] + ln p(v))`` for the requested teacher ids.

    Only student ids that feed a requested teacher id are read, so the cost does not depend on the
    teacher's vocabulary. Exact also where all masses underflow.

    Args:
        positions: int64 [compared].
        teacher_ids: int64 [compared, k]; -1 for empty entries.

    Returns:
        [compared, k], nats; ``-inf``, without a gradient, where the entry is empty, no student id
        reaches it, or all that do have a logit of ``-inf``.
    """
    places, k = teacher_ids.shape
    ids = teacher_ids.clamp_min(0)
    starts = projection.column_starts[ids].flatten()
    counts = (projection.column_starts[ids + 1].flatten() - starts) * (teacher_ids >= 0).flatten()
    pairs = torch.repeat_interleave(torch.arange(places * k, device=positions.device), counts)
    first_entry = counts.cumsum(0) - counts
    entries = torch.arange(len(pairs), device=positions.device) + (starts - first_entry)[pairs]
    read = student.logprobs(
        positions[pairs // max(k, 1)], projection.student_ids[entries], temperature=temperature
    )
    terms = read + projection.log_weights[entries].to(read.dtype)
    return segment_logsumexp(terms, pairs, places * k).view(places, k)
