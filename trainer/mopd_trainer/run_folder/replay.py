"""``Replay``: a run on what another one recorded; nothing is written, and no teacher is asked."""

from collections.abc import Sequence

from mopd_losses.projection.cache import ProjectionCache
from mopd_protocol.errors import ConfigError
from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.run import RunConfig
from mopd_trainer.data.examples import AlignedScore, TrainingExample
from mopd_trainer.metrics.step_metrics import Metrics
from mopd_trainer.metrics.timers import StepTimer
from mopd_trainer.run_folder.recording import RecordedJudgement, Recording, asked_of
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.teachers.connect import Teacher, teacher_of
from mopd_trainer.teachers.scoring import aligned, input_for


class Replay:
    """Step after step of a recording, and from its beginning again when it ends.

    The loss may be another one than that of the recorded run. What it compares is aligned anew;
    samples at which nothing aligns are dropped and counted.

    Raises:
        MopdError: when there is no recording, or it is of other data, of another student's
            tokenizer, or of teachers that were asked for something else.
    """

    def __init__(
        self,
        recording: Recording,
        config: RunConfig,
        identity: RunIdentity,
        prompts: Sequence[Prompt],
        student: StudentIdentity,
        cache: ProjectionCache,
    ) -> None:
        self._recording = recording
        self._prompts = prompts
        self._student = student.table
        if recording.data_fingerprint != identity.data_fingerprint:
            raise ConfigError(
                f"{recording.folder} was recorded on data {recording.data_fingerprint[:12]}, but "
                f"data.prompts is {identity.data_fingerprint[:12]}; set the data of that run"
            )
        if recording.student_tokenizer != student.table.fingerprint:
            raise ConfigError(
                f"{recording.folder} was written with tokenizer "
                f"{recording.student_tokenizer[:12]}, but student.model has "
                f"{student.table.fingerprint[:12]}; take a student with the same tokenizer"
            )
        self.teachers = {
            name: self._teacher(name, config, student, cache) for name in recording.teachers
        }

    @classmethod
    def of(
        cls,
        config: RunConfig,
        identity: RunIdentity,
        prompts: Sequence[Prompt],
        student: StudentIdentity,
        cache: ProjectionCache,
    ) -> "Replay | None":
        """What the run replays; None where it does not."""
        if config.replay is None:
            return None
        return cls(Recording(config.replay), config, identity, prompts, student, cache)

    async def collect(self, step: int, clock: StepTimer) -> tuple[list[TrainingExample], Metrics]:
        """The examples of a step, counted from 0.

        Raises:
            DataError: when the step cannot be read.
        """
        number = step % self._recording.steps + 1
        with clock.phase("sample"):
            samples = self._recording.read(number, self._prompts, self._student)
        examples: list[TrainingExample] = []
        for sample in samples:
            judgements = [self._judgement(one, sample.rollout) for one in sample.scores]
            found = [judgement for judgement in judgements if judgement is not None]
            if len(found) == len(judgements):
                examples.append(TrainingExample(sample.rollout, tuple(found)))
        unaligned = float(len(samples) - len(examples))
        return examples, {"dropped/nothing_aligned": unaligned, "dropped/total": unaligned}

    def _teacher(
        self, name: str, config: RunConfig, student: StudentIdentity, cache: ProjectionCache
    ) -> Teacher:
        if name not in config.scoring_teachers:
            raise ConfigError(
                f"{self._recording.folder} has scores of teacher {name!r}, which this run does not "
                "have; name it under teachers, with the loss that is to learn from them"
            )
        settings, was = config.scoring_teachers[name], self._recording.asked(name)
        for key, value in asked_of(settings).items():
            if was[key] != value:
                raise ConfigError(
                    f"teachers.{name}.{key} is {value!r}, but teacher {name!r} was recorded with "
                    f"{was[key]!r}; set it back, or record again"
                )
        manifest = self._recording.manifest(name)
        tokenizer = self._recording.tokenizer(name)
        return teacher_of(name, settings, manifest, tokenizer, student, cache)

    def _judgement(self, recorded: RecordedJudgement, rollout: Rollout) -> AlignedScore | None:
        teacher, score = self.teachers[recorded.teacher], recorded.score
        view = input_for(teacher, rollout, self._student)
        alignment = aligned(teacher, view, score)
        if not len(alignment):
            return None
        return AlignedScore(recorded.teacher, recorded.weight, view, score, alignment)
