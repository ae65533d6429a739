"""Cross entropy on labels, and its mixture with distillation.

total = (1 - w) * cross entropy + w * distillation
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.core.blockwise_head import LossTerm
from mopd_losses.core.compared_tokens import compared_positions
from mopd_losses.core.loss import AlignedPair, LossOutput
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.core.targets import RowTargets

#: The label of a position without cross entropy.
IGNORED = -100


@dataclass(frozen=True, eq=False)
class LabelTargets(RowTargets):
    """The label at each of ``positions``, which increase; other positions have loss zero."""

    positions: Int64[Tensor, "compared"]
    labels: Int64[Tensor, "compared"]  # student ids


def label_targets(labels: Int64[Tensor, "positions"]) -> LabelTargets:
    """Build the targets of int64 [positions] labels, ``IGNORED`` where there is none."""
    positions = torch.nonzero(labels != IGNORED).flatten()
    return LabelTargets(positions, labels[positions])


@dataclass(frozen=True, eq=False)
class SftLoss:
    """Cross entropy as a ``Loss``: the labels are the tokens of the completion."""

    def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> LabelTargets:
        """See ``Loss``; the teachers' scores are not read."""
        empty = torch.zeros(0, dtype=torch.int64)
        ids = [torch.tensor(c.student.token_ids, dtype=torch.int64) for c in comparisons]
        positions = [torch.arange(len(i)) + o for i, o in zip(ids, offsets, strict=True)]
        return LabelTargets(torch.cat([empty, *positions]), torch.cat([empty, *ids]))

    def __call__(self, student: StudentLogprobs, targets: LabelTargets) -> LossOutput:
        """Return ``-ln p(label)`` in nats at every position with a label."""
        logprobs = student.logprobs(targets.positions, targets.labels)
        return LossOutput(
            student.zeros().index_add(0, targets.positions, -logprobs),
            compared_positions(student, targets.positions),
        )


def mixed_terms(
    supervised: LossTerm,
    distilled: Sequence[LossTerm],
    *,
    distill_weights: Float[Tensor, "positions"],
) -> list[LossTerm]:
    """Return the cross-entropy term and the teachers', with weights scaled to share the total.

    Args:
        distill_weights: [positions], w from 0 to 1: 1 for distillation only.
    """
    return [
        replace(supervised, position_weights=supervised.position_weights * (1 - distill_weights)),
        *(
            replace(term, position_weights=term.position_weights * distill_weights)
            for term in distilled
        ),
    ]
