"""Rows of logits -> truncated distributions: the arithmetic of scoring, and nothing else."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs


@dataclass(frozen=True, eq=False)
class RowScores:
    """What is kept of each row of logits; on the device of the logits."""

    ids: Tensor  # [rows, k], most likely first, -1 where absent
    logprobs: Tensor  # [rows, k], nats, -inf where absent
    token_logprobs: Tensor  # [rows], nats
    tail_logprobs: Tensor  # [rows], nats


def normalize(logits: Tensor, padding: Tensor, temperature: float) -> Tensor:
    """log-softmax of ``logits / temperature`` in float32, over the ids that have a token.

    Args:
        logits: ``[rows, width]`` in any precision.
        padding: ``[width]``, True for rows of the head that belong to no token. They are masked
            after the division, so that whatever stands there (even NaN) changes nothing.
        temperature: softmax temperature.
    """
    scaled = logits.float() / temperature
    return scaled.masked_fill_(padding, -torch.inf).log_softmax(dim=-1)


def keep_top(logprobs: Tensor, tokens: Tensor, top_k: int) -> RowScores:
    """The ``top_k`` most likely ids of each row. Overwrites ``logprobs`` ``[rows, width]``."""
    token_logprobs = _of_tokens(logprobs, tokens)
    kept, ids = logprobs.topk(top_k, dim=-1)
    tail = logprobs.scatter_(1, ids, -torch.inf).logsumexp(dim=-1)
    return RowScores(_absent_where_impossible(ids, kept), kept, token_logprobs, tail)


def keep_candidates(logprobs: Tensor, tokens: Tensor, candidates: Tensor) -> RowScores:
    """Exactly the ``candidates`` ``[rows, k]`` (-1 where absent) of each row, sorted.

    Overwrites ``logprobs`` ``[rows, width]``.
    """
    token_logprobs = _of_tokens(logprobs, tokens)
    absent = candidates < 0
    somewhere = candidates.clamp(min=0)
    kept = logprobs.gather(1, somewhere).masked_fill_(absent, -torch.inf)
    kept, order = kept.sort(dim=-1, descending=True)
    # An absent entry points at id 0, which may be a candidate too: the smaller of two writes wins,
    # so +inf leaves an id as it is and -inf takes it out of the tail.
    taken = torch.full_like(kept, -torch.inf).masked_fill_(absent, torch.inf)
    tail = logprobs.scatter_reduce_(1, somewhere, taken, reduce="amin").logsumexp(dim=-1)
    ids = _absent_where_impossible(candidates.gather(1, order), kept)
    return RowScores(ids, kept, token_logprobs, tail)


def join_rows(parts: list[RowScores]) -> TopKLogprobs:
    """Chunks of rows, in order, as one checked value on the CPU. At least one part."""
    return TopKLogprobs(
        ids=torch.cat([part.ids for part in parts]).cpu().numpy(),
        logprobs=torch.cat([part.logprobs for part in parts]).cpu().numpy(),
        token_logprobs=torch.cat([part.token_logprobs for part in parts]).cpu().numpy(),
        tail_logprobs=torch.cat([part.tail_logprobs for part in parts]).cpu().numpy(),
    )


def _of_tokens(logprobs: Tensor, tokens: Tensor) -> Tensor:
    return logprobs.gather(1, tokens[:, None])[:, 0]


def _absent_where_impossible(ids: Tensor, logprobs: Tensor) -> Tensor:
    """An id without any probability (a model that masks it) is written as absent."""
    return ids.masked_fill(logprobs.isneginf(), ABSENT_ID)
