"""Arithmetic of scoring: rows of logits -> truncated distributions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs


@dataclass(frozen=True, eq=False)
class TruncatedRows:
    """Truncated distributions of rows of logits; on the device of the logits."""

    ids: Tensor  # [rows, k], most likely first, -1 where missing
    logprobs: Tensor  # [rows, k], nats, -inf where missing
    token_logprobs: Tensor  # [rows], nats
    tail_logprobs: Tensor  # [rows], nats


def normalize(logits: Tensor, padding: Tensor, temperature: float) -> Tensor:
    """Return log-softmax of ``logits / temperature`` in float32, over the ids that have a token.

    Args:
        logits: ``[rows, width]`` in any precision.
        padding: ``[width]``, True for rows of the head without a token. Masked after the
            division, so that their logits (even NaN) have no effect.
        temperature: softmax temperature.
    """
    scaled = logits.float() / temperature
    return scaled.masked_fill_(padding, -torch.inf).log_softmax(dim=-1)


def select_top_k(logprobs: Tensor, tokens: Tensor, top_k: int) -> TruncatedRows:
    """Select the ``top_k`` most likely ids per row; overwrites ``logprobs`` ``[rows, width]``."""
    token_logprobs = _token_logprobs(logprobs, tokens)
    selected, ids = logprobs.topk(top_k, dim=-1)
    tail = logprobs.scatter_(1, ids, -torch.inf).logsumexp(dim=-1)
    return TruncatedRows(_mask_impossible(ids, selected), selected, token_logprobs, tail)


def select_candidates(logprobs: Tensor, tokens: Tensor, candidates: Tensor) -> TruncatedRows:
    """Select exactly the ``candidates`` ``[rows, k]`` (-1 where missing) per row, sorted.

    Overwrites ``logprobs`` ``[rows, width]``.
    """
    token_logprobs = _token_logprobs(logprobs, tokens)
    missing = candidates < 0
    columns = candidates.clamp(min=0)
    selected = logprobs.gather(1, columns).masked_fill_(missing, -torch.inf)
    selected, order = selected.sort(dim=-1, descending=True)
    # A missing entry points at id 0, which may also be a candidate: with amin, +inf keeps the
    # value of an id and -inf removes the id from the tail.
    removal = torch.full_like(selected, -torch.inf).masked_fill_(missing, torch.inf)
    tail = logprobs.scatter_reduce_(1, columns, removal, reduce="amin").logsumexp(dim=-1)
    ids = _mask_impossible(candidates.gather(1, order), selected)
    return TruncatedRows(ids, selected, token_logprobs, tail)


def concatenate(chunks: list[TruncatedRows]) -> TopKLogprobs:
    """Concatenate at least one chunk of rows into one validated value on the CPU."""

    def column(name: str) -> Tensor:
        return torch.cat([getattr(chunk, name) for chunk in chunks]).cpu()

    return TopKLogprobs(
        ids=column("ids").numpy(),
        logprobs=column("logprobs").numpy(),
        token_logprobs=column("token_logprobs").numpy(),
        tail_logprobs=column("tail_logprobs").numpy(),
    )


def _token_logprobs(logprobs: Tensor, tokens: Tensor) -> Tensor:
    return logprobs.gather(1, tokens[:, None])[:, 0]


def _mask_impossible(ids: Tensor, logprobs: Tensor) -> Tensor:
    """Mark ids without any probability (masked by the model) as missing."""
    return ids.masked_fill(logprobs.isneginf(), ABSENT_ID)
