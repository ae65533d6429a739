"""The reference answers as a student's tokens spell them, and the student's lookaheads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mopd_client.pool import TeacherPool
from mopd_losses.projection.cache import ProjectionCache
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import Prompt, Rollout
from mopd_protocol.tokenizers.token_table import TextEncoder
from mopd_trainer.config.run import RolloutConfig, StudentConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.data.teacher_input import text_view
from mopd_trainer.rollouts.reference_completions import ReferenceCompletions
from mopd_trainer.rollouts.reference_turns import reply_token_ids
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.teachers.connect import Teacher, connect_teachers
from mopd_trainer.teachers.scoring import RolloutScorer

#: Completions of any length: training applies the limits of a run.
_ANY_LENGTH = RolloutConfig(max_new_tokens=2**31)


class StudentTexts:
    """Requests with the texts of a student's tokens, which its tokenizer may have normalised.

    Args:
        encoders: of the teachers' tokenizers, by name.
    """

    def __init__(self, identity: StudentIdentity, encoders: Mapping[str, TextEncoder]) -> None:
        self.identity = identity
        self._encoders = encoders
        self._references = ReferenceCompletions(identity, _ANY_LENGTH, max_length=None, scored=True)

    def rollout(self, prompt: Prompt) -> Rollout:
        """Return a reference answer in the student's tokens.

        Raises:
            DataError: if the student's template cannot render it as a completion.
        """
        if prompt.reply is not None:
            reply_token_ids(prompt, self.identity)
        [rollout] = self._references.rollouts([prompt], step=0)
        return rollout

    def request(self, rollout: Rollout, teacher: str) -> SequenceRequest:
        """Return the request with the text of these tokens."""
        encoder = self._encoders[teacher]
        return text_view(rollout, self.identity.table, encoder, teacher).request


class StudentLookaheads:
    """Scores what the losses of a student compare besides the completions."""

    def __init__(
        self, student: StudentIdentity, teachers: Mapping[str, Teacher], pool: TeacherPool
    ) -> None:
        self._names = {name for name, each in teachers.items() if each.lookaheads}
        self._scorer = RolloutScorer(pool, teachers, student.table)

    @classmethod
    async def connect(
        cls,
        student: StudentIdentity,
        configs: Mapping[str, TeacherConfig],
        pool: TeacherPool,
        *,
        wait_seconds: float,
    ) -> "StudentLookaheads":
        """Find what each teacher's loss compares.

        Raises:
            ConfigError: if a loss does not support the tokenizers.
        """
        with TemporaryDirectory() as folder:
            cache = ProjectionCache(Path(folder))
            teachers = await connect_teachers(
                pool, configs, student, cache, {}, wait_seconds=wait_seconds
            )
        return cls(student, teachers, pool)

    async def score(self, rollouts: Sequence[Rollout]) -> None:
        """Score the lookaheads of completions whose scores the pool has already."""
        chosen: list[Rollout] = []
        for rollout in rollouts:
            shares = rollout.prompt.teachers.items()
            own = {name: share for name, share in shares if name in self._names}
            if own:
                chosen.append(replace(rollout, prompt=replace(rollout.prompt, teachers=own)))
        if chosen:
            await self._scorer.score(chosen)


def read_student(model: str) -> StudentIdentity:
    """Load a student's tokenizer, without its weights.

    Raises:
        ConfigError: if there is none.
    """
    return StudentIdentity.read(StudentConfig(model=model))
