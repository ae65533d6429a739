"""Cross entropy on given tokens, and how it is mixed with distillation.

total = (1 - w) * cross entropy + w * distillation
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.core.blockwise_head import LossTerm
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.loss_output import LossOutput
from mopd_losses.core.student_rows import StudentLogprobs

#: The label of a slot that is not to be learnt.
IGNORED = -100


@dataclass(frozen=True, eq=False)
class LabelTargets:
    """The token to be said at each of ``slots``, which increase; slots left out cost nothing."""

    slots: Int64[Tensor, "places"]
    labels: Int64[Tensor, "places"]  # the student's ids

    def to(self, device: torch.device | str) -> "LabelTargets":
        """See ``Targets``."""
        return LabelTargets(self.slots.to(device), self.labels.to(device))

    def between(self, start: int, stop: int) -> "LabelTargets":
        """See ``Targets``."""
        first, last = torch.searchsorted(self.slots, self.slots.new_tensor([start, stop])).tolist()
        return LabelTargets(self.slots[first:last] - start, self.labels[first:last])

    def uncuttable(self, slots: int) -> Tensor:
        """See ``Targets``: every place is one slot."""
        return torch.zeros(slots + 1, dtype=torch.bool)


def label_targets(labels: Int64[Tensor, "slots"]) -> LabelTargets:
    """Targets of int64 [slots] labels, ``IGNORED`` where a slot is not to be learnt."""
    slots = torch.nonzero(labels != IGNORED).flatten()
    return LabelTargets(slots, labels[slots])


@dataclass(frozen=True, eq=False)
class SftLoss:
    """Cross entropy: a ``Loss``, for which a completion's own tokens are the labels."""

    def targets(
        self, comparisons: Sequence[AlignedPair], slot_offsets: Sequence[int]
    ) -> LabelTargets:
        """See ``Loss``; what the teachers of the comparisons said plays no part."""
        nothing = torch.zeros(0, dtype=torch.int64)
        ids = [torch.tensor(c.student.token_ids, dtype=torch.int64) for c in comparisons]
        slots = [torch.arange(len(i)) + o for i, o in zip(ids, slot_offsets, strict=True)]
        return LabelTargets(torch.cat([nothing, *slots]), torch.cat([nothing, *ids]))

    def __call__(self, student: StudentLogprobs, targets: LabelTargets) -> LossOutput:
        """``-ln p(label)`` in nats at every slot with a label."""
        logprobs = student.logprobs(targets.slots, targets.labels)
        return LossOutput(student.zeros().index_add(0, targets.slots, -logprobs))


def mixed_terms(
    supervised: LossTerm, distilled: Sequence[LossTerm], *, distill_weights: Float[Tensor, "slots"]
) -> list[LossTerm]:
    """The cross-entropy term, then the teachers', with slot weights scaled to share the total.

    Args:
        distill_weights: [slots], w from 0 to 1: 1 where only the teachers are to be heard.
    """
    return [
        replace(supervised, slot_weights=supervised.slot_weights * (1 - distill_weights)),
        *(replace(term, slot_weights=term.slot_weights * distill_weights) for term in distilled),
    ]
