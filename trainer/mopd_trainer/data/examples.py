"""``TrainingExample``: a completion with its teachers' aligned scores, its rewards, or both."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_alignment import Alignment
from mopd_losses.core.loss import Lookahead
from mopd_protocol.errors import DataError
from mopd_protocol.samples import Rollout, TeacherScore
from mopd_protocol.teacher_input import TeacherInput

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class AlignedScore:
    """One teacher's score of a completion, aligned with the student's tokens."""

    teacher: str
    weight: float  # share of this teacher in the sample; the weights of a sample sum to one
    teacher_input: TeacherInput
    score: TeacherScore
    alignment: Alignment
    lookaheads: tuple[Lookahead, ...] | None = None  # see ``AlignedPair``
    selected: BoolArray | None = None  # [sent tokens], those to train; None: all of the completion

    def selected_tokens(self, length: int) -> int:
        """Return the number of tokens to train, of a completion of ``length`` tokens."""
        return length if self.selected is None else int(self.selected.sum())


@dataclass(frozen=True, eq=False)
class TrainingExample:
    """A completion and the scores of its teachers; its rewards are those of the rollout.

    Raises:
        DataError: when the completion is a rollout without any score or reward.
    """

    rollout: Rollout
    scores: tuple[AlignedScore, ...]
    advantage: float | None = None  # of each token, see ``advantages``; None without a reward term

    def __post_init__(self) -> None:
        if not self.scores and not self.rollout.rewards and self.rollout.source == "rollout":
            raise DataError(
                f"prompt {self.rollout.prompt.index}: the rollout has no score and no reward "
                "(found 0, expected 1 or more)"
            )

    @property
    def length(self) -> int:
        """Number of prompt and completion tokens."""
        return len(self.rollout.prompt_token_ids) + len(self.rollout.completion)
