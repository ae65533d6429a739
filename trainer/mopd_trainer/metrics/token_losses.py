"""Each completion's loss per token by each teacher, for reports."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mopd_losses.core.loss import LossOutput
from mopd_trainer.data.packing import MicroBatch, TeacherPart

#: [tokens], nats before any weight; NaN where teacher and student were not compared.
TokenLosses = NDArray[np.float32]


def token_losses(
    output: LossOutput, part: TeacherPart, batch: MicroBatch
) -> dict[int, TokenLosses]:
    """Return the losses of every example of a micro-batch that the teacher scored, by index."""
    nats = output.per_token.masked_fill(output.compared == 0, torch.nan)
    nats = nats.detach().float().cpu().numpy()
    starts = np.cumsum([0, *batch.example_slots]).tolist()
    scored = set(part.slot_offsets)
    return {
        index: nats[start : start + length]
        for index, start, length in zip(batch.examples, starts, batch.example_slots, strict=False)
        if length and start in scored
    }


def rounded(nats: TokenLosses) -> Sequence[float | None]:
    """Return JSON values with four significant digits; ``None`` where nothing was measured."""
    return [None if not np.isfinite(value) else float(f"{value:.4g}") for value in nats.tolist()]
