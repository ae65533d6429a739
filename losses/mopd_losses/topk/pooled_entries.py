"""Top-k entries of several rows, added up by id."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.core.segments import segment_logsumexp


def pooled_entries(
    owners: Int64[Tensor, "rows"],
    ids: Int64[Tensor, "rows k"],
    logprobs: Float[Tensor, "rows k"],
    count: int,
) -> tuple[Int64[Tensor, "owners most_ids"], Float[Tensor, "owners most_ids"]]:
    """Add the probabilities of each owner's entries of one id.

    Args:
        owners: int64 [rows], ascending.
        ids: int64 [rows, k]; -1 where missing.
        logprobs: [rows, k], nats.
        count: number of owners.

    Returns:
        Ids and logprobs, [count, most ids]; ``-1`` with ``-inf`` where missing.
    """
    present = ids >= 0
    size = int(ids.max()) + 1 if present.any() else 1
    keys, entry = (owners[:, None] * size + ids)[present].unique(return_inverse=True)
    masses = segment_logsumexp(logprobs[present], entry, len(keys))
    owner = keys // size
    counts = torch.bincount(owner, minlength=count)
    column = torch.arange(len(keys), device=keys.device) - (counts.cumsum(0) - counts)[owner]
    shape = (count, int(counts.max()) if len(keys) else 0)
    pooled_ids = torch.full(shape, -1, dtype=torch.int64, device=keys.device)
    pooled_logprobs = torch.full(shape, -torch.inf, dtype=masses.dtype, device=keys.device)
    pooled_ids[owner, column] = keys % size
    pooled_logprobs[owner, column] = masses
    return pooled_ids, pooled_logprobs
