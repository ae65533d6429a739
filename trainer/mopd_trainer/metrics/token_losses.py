"""What each token of a completion cost by each of its teachers, for the few that people read."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_alignment import Alignment
from mopd_losses.core.loss_output import LossOutput
from mopd_trainer.data.packing import TeacherPart

#: [tokens], nats before any weight; NaN where a teacher was not compared with the student.
TokenLosses = NDArray[np.float32]


def token_losses(
    output: LossOutput, part: TeacherPart, shown: Mapping[int, range]
) -> dict[int, TokenLosses]:
    """Of the shown examples of a micro-batch that the teacher judged, by their numbers.

    Args:
        shown: number of an example -> its slots.
    """
    judged = dict(zip(part.slot_offsets, part.comparisons, strict=True))
    found: dict[int, TokenLosses] = {}
    for number, slots in shown.items():
        comparison = judged.get(slots.start)
        if comparison is not None and len(slots):
            nats = output.per_token[slots.start : slots.stop].detach().float().cpu().numpy()
            found[number] = _of_compared(nats, comparison.alignment)
    return found


def _of_compared(nats: TokenLosses, alignment: Alignment) -> TokenLosses:
    """NaN for a nought that nobody measured.

    A loss leaves noughts where it compares nothing. Where one token spells what one token spells,
    every loss compares, and models that agree may do so to the last bit.
    """
    single = alignment.student_ends - alignment.student_starts == 1
    single &= alignment.teacher_ends - alignment.teacher_starts == 1
    compared = nats != 0
    compared[alignment.student_starts[single]] = True
    return np.where(compared, nats, np.float32(np.nan))


def rounded(nats: TokenLosses) -> Sequence[float | None]:
    """For JSON: four significant digits, ``None`` for what was not measured."""
    return [None if not np.isfinite(value) else float(f"{value:.4g}") for value in nats.tolist()]
