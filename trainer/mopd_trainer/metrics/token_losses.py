"""Each completion's loss per token by each teacher, for reports."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mopd_losses.alignment.byte_alignment import Alignment
from mopd_losses.core.loss import LossOutput
from mopd_trainer.data.packing import MicroBatch, TeacherPart

#: [tokens], nats before any weight; NaN where teacher and student were not compared.
TokenLosses = NDArray[np.float32]


def token_losses(
    output: LossOutput, part: TeacherPart, batch: MicroBatch
) -> dict[int, TokenLosses]:
    """Return the losses of every example of a micro-batch that the teacher scored, by index."""
    nats = output.per_token.detach().float().cpu().numpy()
    lengths = torch.bincount(batch.slot_rows, minlength=len(batch.examples)).tolist()
    starts = np.cumsum([0, *lengths]).tolist()
    pairs = dict(zip(part.slot_offsets, part.comparisons, strict=True))
    return {
        index: _with_missing(nats[start : start + length], pairs[start].alignment)
        for index, start, length in zip(batch.examples, starts, lengths, strict=False)
        if length and start in pairs
    }


def _with_missing(nats: TokenLosses, alignment: Alignment) -> TokenLosses:
    """Replace a zero that was not measured by NaN.

    A loss is zero where it compares nothing. Where one student token is aligned with one teacher
    token every loss compares, and identical models may give exactly zero.
    """
    single = alignment.student_ends - alignment.student_starts == 1
    single &= alignment.teacher_ends - alignment.teacher_starts == 1
    compared = nats != 0
    compared[alignment.student_starts[single]] = True
    return np.where(compared, nats, np.float32(np.nan))


def rounded(nats: TokenLosses) -> Sequence[float | None]:
    """Return JSON values with four significant digits; ``None`` where nothing was measured."""
    return [None if not np.isfinite(value) else float(f"{value:.4g}") for value in nats.tolist()]
