"""Rows of logits -> logprobs of chosen ids, of the completion token, and of the tail."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs


@dataclass(frozen=True, eq=False)
class LocalRowScores:
    """``TopKLogprobs`` on the device of the logits."""

    ids: Tensor  # int64 [rows, k], most likely first, -1 where missing
    logprobs: Tensor  # [rows, k], nats
    token_logprobs: Tensor  # [rows], nats
    tail_logprobs: Tensor  # [rows], nats

    def part(self, rows: slice, width: int) -> TopKLogprobs:
        """Return some rows, cut to a width, on the CPU."""
        return TopKLogprobs(
            ids=self.ids[rows, :width].cpu().numpy(),
            logprobs=self.logprobs[rows, :width].cpu().numpy(),
            token_logprobs=self.token_logprobs[rows].cpu().numpy(),
            tail_logprobs=self.tail_logprobs[rows].cpu().numpy(),
        )


def row_scores(
    logits: Tensor,
    tokens: Tensor,
    *,
    top_k: int,
    candidates: Tensor | None = None,
    temperature: float = 1.0,
) -> LocalRowScores:
    """Return the most likely ids of each row, or the candidates, and the mass of the tail.

    Args:
        logits: float32 [rows, width]; ``-inf`` for ids that have no token.
        tokens: int64 [rows], the completion tokens.
        candidates: int64 [rows, k], -1 where missing; no id twice in a row.
    """
    logprobs = (logits / temperature).log_softmax(dim=1)
    ids = logprobs.topk(top_k, dim=1).indices if candidates is None else candidates
    chosen_logprobs = logprobs.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    kept, order = chosen_logprobs.sort(dim=1, descending=True)
    # One extra column for missing entries.
    chosen = torch.zeros((len(ids), logits.shape[1] + 1), dtype=torch.bool, device=logits.device)
    chosen.scatter_(1, torch.where(ids < 0, logits.shape[1], ids), True)
    return LocalRowScores(
        ids=ids.gather(1, order).masked_fill(kept.isneginf(), ABSENT_ID),
        logprobs=kept,
        token_logprobs=logprobs.gather(1, tokens[:, None])[:, 0],
        tail_logprobs=logprobs.masked_fill(chosen[:, :-1], -torch.inf).logsumexp(dim=1),
    )


def concatenate(parts: list[LocalRowScores]) -> LocalRowScores:
    """Concatenate rows of equal width."""
    return LocalRowScores(
        *(
            torch.cat([getattr(part, name) for part in parts])
            for name in ("ids", "logprobs", "token_logprobs", "tail_logprobs")
        )
    )
