"""``TrainingExample``: a completion with its teachers' aligned scores."""

from dataclasses import dataclass

from mopd_losses.alignment.byte_alignment import Alignment
from mopd_losses.core.loss import Lookahead
from mopd_protocol.errors import DataError
from mopd_protocol.samples import Rollout, TeacherScore
from mopd_protocol.teacher_input import TeacherInput


@dataclass(frozen=True, eq=False)
class AlignedScore:
    """One teacher's score of a completion, aligned with the student's tokens."""

    teacher: str
    weight: float  # share of this teacher in the sample; the weights of a sample sum to one
    teacher_input: TeacherInput
    score: TeacherScore
    alignment: Alignment
    lookaheads: tuple[Lookahead, ...] | None = None  # see ``AlignedPair``


@dataclass(frozen=True, eq=False)
class TrainingExample:
    """A completion and the scores of its teachers.

    Raises:
        DataError: when the completion is a rollout without any score.
    """

    rollout: Rollout
    scores: tuple[AlignedScore, ...]

    def __post_init__(self) -> None:
        if not self.scores and self.rollout.source == "rollout":
            raise DataError(
                f"prompt {self.rollout.prompt.index}: the rollout has no score (found 0, expected "
                "1 or more)"
            )

    @property
    def length(self) -> int:
        """Number of prompt and completion tokens."""
        return len(self.rollout.prompt_token_ids) + len(self.rollout.completion)
