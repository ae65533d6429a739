"""A divergence from a local teacher's full distributions, without truncation.

Full rows of a large vocabulary take too much memory: 150,000 ids in float32 are 600 kB a token. The
teacher's hidden state of each row, a few kB, is stored instead, and the teacher's head computes the
rows together with the student's, a block at a time. There is no tail, hence no form.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from mopd_losses.config import TopKKlConfig
from mopd_losses.core.blockwise_head import Head
from mopd_losses.core.compared_tokens import compared_positions
from mopd_losses.core.loss import AlignedPair, LossOutput
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.core.targets import RowTargets
from mopd_losses.divergences.divergences import divergence_of
from mopd_losses.ends.end_event import EndEvent
from mopd_losses.ends.one_end_rows import OneEndRows
from mopd_protocol.errors import DataError
from mopd_protocol.samples import TeacherScore


@dataclass(frozen=True, eq=False)
class HiddenScore(TeacherScore):
    """A score with the hidden states of the teacher's rows.

    Raises:
        DataError: if the number of hidden states is not the number of tokens.
    """

    hidden: Tensor  # [tokens, hidden size]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.hidden) != len(self.completion):
            raise DataError(
                f"score: one hidden state per token required (found {len(self.hidden)}, expected "
                f"{len(self.completion)}).",
                key="hidden",
            )


@dataclass(frozen=True, eq=False)
class HiddenTargets(RowTargets):
    """The teacher's hidden states at the positions that are compared."""

    positions: Int64[Tensor, "compared"]
    hidden: Float[Tensor, "compared hidden_size"]


@dataclass(frozen=True, eq=False)
class FullVocabularyLoss:
    """Any divergence of ``divergences`` over all ids of one tokenizer: a ``Loss``.

    Full rows allow any temperature; the value is multiplied by its square, so that gradients keep
    their size (Hinton et al. 2015).
    """

    head: Head  # the teacher's, on the student's device
    settings: TopKKlConfig
    teacher_temperature: float = 1.0  # if the settings contain none
    ends: EndEvent | None = None  # if the sides end with other tokens

    def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> HiddenTargets:
        """See ``Loss``.

        Raises:
            DataError: if a score has no hidden states.
        """
        if not comparisons:
            width = self.head.weight.shape[1]
            return HiddenTargets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, width))
        positions: list[Tensor] = []
        hidden: list[Tensor] = []
        for comparison, offset in zip(comparisons, offsets, strict=True):
            if not isinstance(comparison.score, HiddenScore):
                raise DataError(
                    "support 'full': the score has no hidden states, which full rows are computed "
                    "from. Score again with this teacher and support 'full'.",
                    key="hidden",
                )
            starts = comparison.alignment.student_starts
            positions.append(torch.tensor(starts, dtype=torch.int64) + offset)
            rows = torch.tensor(comparison.alignment.teacher_starts, dtype=torch.int64)
            hidden.append(comparison.score.hidden[rows])
        return HiddenTargets(torch.cat(positions), torch.cat(hidden))

    def __call__(self, student: StudentLogprobs, targets: HiddenTargets) -> LossOutput:
        """See ``Loss``."""
        temperature = self.settings.kd_temperature or self.teacher_temperature
        rows = student if self.ends is None else OneEndRows(student, self.ends.student_ids)
        logprobs = rows.whole_rows(targets.positions, temperature=temperature)
        logits = _padded(self.head.logits(targets.hidden), student.width)
        # As the student's rows are normalised: equal logits have a loss of exactly zero.
        shifted = (logits - logits.amax(dim=1, keepdim=True)) / temperature
        teacher = (shifted - shifted.logsumexp(dim=1, keepdim=True)).to(logprobs.dtype)
        teacher = teacher if self.ends is None else self.ends.teacher_rows(teacher)
        values = divergence_of(self.settings)(logprobs, teacher)
        per_token = student.zeros().index_add(0, targets.positions, values * temperature**2)
        ones = torch.ones_like(values.detach())
        zeros = torch.zeros_like(ones)
        return LossOutput(
            per_token,
            compared_positions(student, targets.positions),
            {
                "teacher_mass": ones,
                "student_mass": ones,
                "unsupported_mass": zeros,
                "unprojected_mass": zeros,
            },
        )


def _padded(logits: Float[Tensor, "rows ids"], width: int) -> Float[Tensor, "rows width"]:
    """Pad to the student's width; heads of one tokenizer differ only in padding rows."""
    return pad(logits, (0, width - logits.shape[1]), value=-torch.inf)
