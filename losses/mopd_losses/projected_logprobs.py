"""The student's log-probability of teacher ids, through a projection, without a dense product."""

import torch
from torch import Tensor

from mopd_losses.projection_cache import DeviceProjection


def projected_logprobs(
    logits: Tensor, log_normalisers: Tensor, teacher_ids: Tensor, projection: DeviceProjection
) -> Tensor:
    """``ln q(j) = logsumexp over v of (ln W[v, j] + z(v)) - lse`` for the asked teacher ids.

    Only logits of student ids that feed an asked teacher id are gathered, so the cost does not
    depend on the teacher's vocabulary. Exact also where all masses underflow.

    Args:
        logits: [places, student width].
        log_normalisers: [places], logsumexp of each row over the student's real ids.
        teacher_ids: int64 [places, k]; -1 where absent.

    Returns:
        [places, k], nats; ``-inf``, without a gradient, where the id is absent, no student id
        reaches it, or all that do have a logit of ``-inf``.
    """
    places, k = teacher_ids.shape
    asked = teacher_ids.clamp_min(0)
    starts = projection.column_starts[asked].flatten()
    counts = (projection.column_starts[asked + 1].flatten() - starts) * (teacher_ids >= 0).flatten()
    pairs = torch.repeat_interleave(torch.arange(places * k, device=logits.device), counts)
    first_entry = counts.cumsum(0) - counts
    entries = torch.arange(len(pairs), device=logits.device) + (starts - first_entry)[pairs]
    gathered = logits[pairs // max(k, 1), projection.student_ids[entries]]
    terms = gathered + projection.log_weights[entries].to(logits.dtype)
    # A log-sum-exp over ragged columns: the maximum is a constant of the gradient.
    peaks = torch.full((places * k,), -torch.inf, dtype=logits.dtype, device=logits.device)
    peaks = peaks.scatter_reduce(0, pairs, terms.detach(), "amax")
    reached = ~torch.isneginf(peaks)  # also not where every logit is -inf
    shifts = torch.where(reached, peaks, 0.0)
    sums = torch.zeros_like(peaks).index_add(0, pairs, (terms - shifts[pairs]).exp())
    # log(1) where nothing was summed: log(0) there would send NaN back through the graph.
    logs = torch.where(reached, sums, 1.0).log() + peaks
    return logs.view(places, k) - log_normalisers.unsqueeze(1)
