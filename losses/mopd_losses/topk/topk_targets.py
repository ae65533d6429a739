"""``TopKTargets``: what a teacher says at the places where the student can be compared with it.

At the start of an aligned span both models have read the same bytes, so their next-token
distributions answer the same question. The first row of the span on either side is compared; the
rows inside a longer span condition on a piece that the other side has no boundary for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.alignment.byte_alignment import Alignment
from mopd_protocol.topk_logprobs import TopKLogprobs


@dataclass(frozen=True, eq=False)
class TopKTargets:
    """Teacher distributions at ``places``, most likely first; natural logs.

    An absent entry is id ``-1`` with logprob ``-inf``.
    """

    slots: Int64[Tensor, "places"]  # which student token each is about
    ids: Int64[Tensor, "places k"]  # teacher ids
    logprobs: Float[Tensor, "places k"]  # nats
    tail_logprobs: Float[Tensor, "places"]  # nats: log of the mass outside the k

    def to(self, device: torch.device | str) -> "TopKTargets":
        """The same targets on a device."""
        return TopKTargets(
            self.slots.to(device),
            self.ids.to(device),
            self.logprobs.to(device),
            self.tail_logprobs.to(device),
        )

    def between(self, start: int, stop: int) -> "TopKTargets":
        """See ``Targets``; slots are in increasing order."""
        first, last = torch.searchsorted(self.slots, self.slots.new_tensor([start, stop])).tolist()
        places = slice(first, last)
        return TopKTargets(
            self.slots[places] - start,
            self.ids[places],
            self.logprobs[places],
            self.tail_logprobs[places],
        )

    def uncuttable(self, slots: int) -> Tensor:
        """See ``Targets``: every place is one slot."""
        return torch.zeros(slots + 1, dtype=torch.bool)


def topk_targets(alignment: Alignment, topk: TopKLogprobs) -> TopKTargets:
    """The targets of one completion; slots count the completion's own tokens from 0."""
    rows = alignment.teacher_starts
    return TopKTargets(
        slots=torch.tensor(alignment.student_starts, dtype=torch.int64),
        ids=torch.tensor(topk.ids[rows], dtype=torch.int64),
        logprobs=torch.tensor(topk.logprobs[rows], dtype=torch.float32),
        tail_logprobs=torch.tensor(topk.tail_logprobs[rows], dtype=torch.float32),
    )


def concatenate_targets(parts: Sequence[TopKTargets], slot_offsets: Sequence[int]) -> TopKTargets:
    """Targets of several completions as one, each part's slots moved by its offset.

    Parts with fewer entries a row are filled up with absent ones.
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
        slots=torch.cat([p.slots + o for p, o in zip(parts, slot_offsets, strict=True)]),
        ids=torch.cat([widened(part.ids, -1) for part in parts]),
        logprobs=torch.cat([widened(part.logprobs, -np.inf) for part in parts]),
        tail_logprobs=torch.cat([part.tail_logprobs for part in parts]),
    )
