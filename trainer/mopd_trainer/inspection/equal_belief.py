"""``equal_belief``: the loss between two models that are equally sure of one text.

Each model gives every token of its tokenization of the text the same probability, and the
remaining mass to all other tokens equally. They agree about the text, so that a divergence should
be close to zero, and its gradient should not push down the student's own tokens.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mopd_losses.alignment.text_offsets import align_text
from mopd_losses.build import build_loss
from mopd_losses.config import LossConfig
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.projection.cache import ProjectionCache
from mopd_losses.projection.sides import StudentSide, TokenizerSide
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import TopKLogprobs

#: Entries of a row of the teacher.
_K = 64


@dataclass(frozen=True, eq=False)
class EqualBelief:
    """Losses of the student's tokens; NaN where none was compared."""

    nats: NDArray[np.float32]
    pushed_down: NDArray[np.bool_]
    """Tokens whose logit the loss lowers."""
    compared: NDArray[np.float32]
    """Share of each token that is compared: without a comparison there is no loss either."""


def equal_belief(
    config: LossConfig,
    student: StudentSide,
    teacher: TokenizerSide,
    sequences: tuple[TokenSequence, TokenSequence],
    *,
    confidence: float = 0.999,
    threshold: float = 0.1,
    cache: ProjectionCache | None = None,
) -> EqualBelief:
    """Return the loss on a text.

    Args:
        sequences: the text in the student's and in the teacher's tokens.
        confidence: probability of each token.
        threshold: smallest gradient, in nats per unit of logit, of a token that is pushed down.

    Raises:
        ConfigError: if the loss does not support these tokenizers.
    """
    loss = build_loss(config, student, teacher, cache=cache)
    ids = torch.tensor(sequences[0].token_ids, dtype=torch.int64)
    others = np.log((1 - confidence) / (student.table.size - 1))
    logits = torch.full((len(ids), student.logit_width), float(others))
    logits[torch.arange(len(ids)), ids] = float(np.log(confidence))
    logits.requires_grad_()
    real_ids = torch.tensor(student.table.real_ids(student.logit_width))
    topk = _sure(sequences[1].token_ids, teacher.table, confidence)
    pair = AlignedPair(
        sequences[0],
        np.full(len(ids), np.log(confidence), dtype=np.float32),
        TeacherScore("teacher", sequences[1], topk),
        align_text(*sequences, teacher.encoder),
        lookaheads=(),  # the texts agree: the scores contain every row
    )
    output = loss(DenseRows(logits, real_ids), loss.targets([pair], [0]))
    output.per_token.sum().backward()
    gradient = torch.zeros(len(ids)) if logits.grad is None else logits.grad
    pushed = gradient[torch.arange(len(ids)), ids] > threshold
    nats = output.per_token.detach().masked_fill(output.compared == 0, torch.nan)
    return EqualBelief(nats.float().numpy(), pushed.numpy(), output.compared.float().numpy())


def _sure(token_ids: Any, table: TokenTable, confidence: float) -> TopKLogprobs:
    """Return rows of a model that gives each token ``confidence``.

    Listed are a token and its neighbours in the order of bytes, as in a real top-k: tokens that it
    begins with, that begin with it, and others like it. All have the same probability.
    """
    present = sorted(np.flatnonzero(table.present).tolist(), key=table.bytes_of)
    ranks = {token: rank for rank, token in enumerate(present)}
    by_bytes = {table.bytes_of(token): token for token in reversed(present)}
    k = min(_K, len(present))
    other = np.log((1 - confidence) / (table.size - 1))
    ids = np.empty((len(token_ids), k), dtype=np.int32)
    for row, token in enumerate(map(int, token_ids)):
        text, rank = table.bytes_of(token), ranks[token]
        beginnings = [by_bytes[text[:n]] for n in range(1, len(text)) if text[:n] in by_bytes]
        first = max(min(rank - k // 2, len(present) - k), 0)
        neighbours = sorted(present[first : first + k], key=lambda each: abs(ranks[each] - rank))
        ids[row] = list(dict.fromkeys([token, *beginnings, *neighbours]))[:k]
    logprobs = np.full(ids.shape, other, dtype=np.float32)
    logprobs[:, 0] = np.log(confidence)
    rest = (1 - confidence) * (table.size - k) / (table.size - 1)
    tails = np.full(len(ids), np.log(rest) if rest > 0 else -np.inf, dtype=np.float32)
    return TopKLogprobs(ids, logprobs, logprobs[:, 0].copy(), tails)
