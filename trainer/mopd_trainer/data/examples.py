"""``TrainingExample``: everything that the losses need to know about one completion."""

from dataclasses import dataclass

from mopd_losses.alignment.byte_alignment import Alignment
from mopd_protocol.errors import DataError
from mopd_protocol.samples import Rollout, TeacherScore
from mopd_trainer.data.teacher_input import TeacherInput


@dataclass(frozen=True, eq=False)
class AlignedScore:
    """One teacher's score of a completion, aligned with the student's tokens."""

    teacher: str
    weight: float  # share of this teacher in the sample; a sample's weights sum to one
    view: TeacherInput
    score: TeacherScore
    alignment: Alignment


@dataclass(frozen=True, eq=False)
class TrainingExample:
    """A completion and what its teachers say about it.

    Raises:
        DataError: when the student wrote it and no teacher judged it: nothing could be learnt.
    """

    rollout: Rollout
    judgements: tuple[AlignedScore, ...]

    def __post_init__(self) -> None:
        if not self.judgements and self.rollout.source == "rollout":
            raise DataError(f"the rollout of prompt {self.rollout.prompt.index} has no judgement")

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.rollout.prompt_token_ids) + len(self.rollout.completion)
