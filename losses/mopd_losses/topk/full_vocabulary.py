"""A divergence from a teacher's whole distributions, for a teacher whose head is on this machine.

Whole rows of a large vocabulary are too many to keep: 150,000 ids in float32 are 600 kB a token.
What is kept of the teacher is the hidden state behind each row, a few kB, and rows are made of it
by the teacher's head when the student's are, a block at a time. Nothing is cut off, so there is no
tail and no form to choose.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from mopd_losses.config import TopKKlConfig
from mopd_losses.core.blockwise_head import Head
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.loss_output import LossOutput
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.divergences.divergences import divergence_of
from mopd_protocol.errors import DataError
from mopd_protocol.samples import TeacherScore


@dataclass(frozen=True, eq=False)
class HiddenScore(TeacherScore):
    """A score with the hidden states that the teacher's head makes its rows of.

    Raises:
        DataError: when there is not one hidden state a token.
    """

    hidden: Tensor  # [tokens, hidden size]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.hidden) != len(self.completion):
            raise DataError(
                f"{len(self.hidden)} hidden states for {len(self.completion)} scored tokens"
            )


@dataclass(frozen=True, eq=False)
class HiddenTargets:
    """The teacher's hidden states at the slots that are compared."""

    slots: Int64[Tensor, "places"]
    hidden: Float[Tensor, "places hidden_size"]

    def to(self, device: torch.device | str) -> "HiddenTargets":
        """See ``Targets``."""
        return HiddenTargets(self.slots.to(device), self.hidden.to(device))

    def between(self, start: int, stop: int) -> "HiddenTargets":
        """See ``Targets``; slots are in increasing order."""
        first, last = torch.searchsorted(self.slots, self.slots.new_tensor([start, stop])).tolist()
        return HiddenTargets(self.slots[first:last] - start, self.hidden[first:last])

    def uncuttable(self, slots: int) -> Tensor:
        """See ``Targets``: every place is one slot."""
        return torch.zeros(slots + 1, dtype=torch.bool)


@dataclass(frozen=True, eq=False)
class FullVocabularyLoss:
    """Any divergence of ``divergences`` over all ids of one tokenizer: a ``Loss``.

    Its temperature may be any, as whole rows say what they weigh at each; the value is multiplied
    by its square, so that gradients keep their size (Hinton et al. 2015).
    """

    head: Head  # the teacher's, on the student's device
    settings: TopKKlConfig
    teacher_temperature: float = 1.0  # where the settings do not name one

    def targets(
        self, comparisons: Sequence[AlignedPair], slot_offsets: Sequence[int]
    ) -> HiddenTargets:
        """See ``Loss``.

        Raises:
            DataError: for a score without hidden states.
        """
        slots: list[Tensor] = []
        hidden: list[Tensor] = []
        for comparison, offset in zip(comparisons, slot_offsets, strict=True):
            if not isinstance(comparison.score, HiddenScore):
                raise DataError(
                    "a score without hidden states, of which no whole rows can be made; was it "
                    "made by another teacher, or before support was 'full'?"
                )
            starts = comparison.alignment.student_starts
            slots.append(torch.tensor(starts, dtype=torch.int64) + offset)
            rows = torch.tensor(comparison.alignment.teacher_starts, dtype=torch.int64)
            hidden.append(comparison.score.hidden[rows])
        return HiddenTargets(torch.cat(slots), torch.cat(hidden))

    def __call__(self, student: StudentLogprobs, targets: HiddenTargets) -> LossOutput:
        """See ``Loss``."""
        temperature = self.settings.kd_temperature or self.teacher_temperature
        ours = student.whole_rows(targets.slots, temperature=temperature)
        theirs = _as_wide(self.head.logits(targets.hidden), student.width) / temperature
        values = divergence_of(self.settings)(ours, theirs.log_softmax(dim=1).to(ours.dtype))
        per_token = student.zeros().index_add(0, targets.slots, values * temperature**2)
        everything = torch.ones_like(values.detach())
        nothing = torch.zeros_like(everything)
        return LossOutput(
            per_token,
            {
                "teacher_mass": everything,
                "student_mass": everything,
                "unsupported_mass": nothing,
                "unprojected_mass": nothing,
            },
        )


def _as_wide(logits: Float[Tensor, "rows ids"], width: int) -> Float[Tensor, "rows width"]:
    """Heads of one tokenizer differ in their padding alone, which has no probability."""
    return pad(logits, (0, width - logits.shape[1]), value=-torch.inf)
