"""``TopKTargets``: a teacher's top-k at the positions where the student can be compared with it.

At the start of an aligned span both models have the same bytes as context, so their next-token
distributions are comparable. The first row of the span on either side is compared; rows inside a
longer span condition on a piece that the other side has no boundary for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.alignment.byte_alignment import Alignment
from mopd_losses.core.targets import RowTargets
from mopd_protocol.topk_logprobs import TopKLogprobs


@dataclass(frozen=True, eq=False)
class TopKTargets(RowTargets):
    """Teacher distributions, most likely first; missing entries are ``-1`` with ``-inf``."""

    positions: Int64[Tensor, "compared"]  # student tokens that the rows predict
    ids: Int64[Tensor, "compared k"]  # teacher ids
    logprobs: Float[Tensor, "compared k"]  # nats
    tail_logprobs: Float[Tensor, "compared"]  # nats: log of the mass outside the k


def topk_targets(alignment: Alignment, topk: TopKLogprobs) -> TopKTargets:
    """Build the targets of one completion; positions count its tokens from 0."""
    rows = alignment.teacher_starts
    return TopKTargets(
        positions=torch.tensor(alignment.student_starts, dtype=torch.int64),
        ids=torch.tensor(topk.ids[rows], dtype=torch.int64),
        logprobs=torch.tensor(topk.logprobs[rows], dtype=torch.float32),
        tail_logprobs=torch.tensor(topk.tail_logprobs[rows], dtype=torch.float32),
    )


def concatenate_targets(parts: Sequence[TopKTargets], offsets: Sequence[int]) -> TopKTargets:
    """Concatenate the targets of several completions, shifting each part's positions by its offset.

    Parts with fewer entries a row are padded with missing ones.
    """
    width = max((part.ids.shape[1] for part in parts), default=0)

    def widened(rows: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=fill)

    if not parts:
        return TopKTargets(
            torch.zeros(0, dtype=torch.int64),
            torch.zeros((0, 0), dtype=torch.int64),
            torch.zeros((0, 0)),
            torch.zeros(0),
        )
    return TopKTargets(
        positions=torch.cat([p.positions + o for p, o in zip(parts, offsets, strict=True)]),
        ids=torch.cat([widened(part.ids, -1) for part in parts]),
        logprobs=torch.cat([widened(part.logprobs, -np.inf) for part in parts]),
        tail_logprobs=torch.cat([part.tail_logprobs for part in parts]),
    )
