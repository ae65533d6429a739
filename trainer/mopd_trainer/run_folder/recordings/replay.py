"""``Replay``: training on the recording of another run, without sampling and without teachers."""

from collections.abc import Sequence

from mopd_losses.projection.cache import ProjectionCache
from mopd_protocol.errors import ConfigError
from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.run import RunConfig
from mopd_trainer.data.examples import AlignedScore, TrainingExample
from mopd_trainer.data.selection import TokenSelection, first_tokens
from mopd_trainer.metrics.step_metrics import Metrics
from mopd_trainer.metrics.timers import StepTimer
from mopd_trainer.run_folder.recordings.recording import RecordedScore, Recording
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.teachers.connect import Teacher, teacher_of
from mopd_trainer.teachers.scoring import aligned, input_for
from mopd_trainer.teachers.stored.facts import scoring_options


class Replay:
    """Steps of a recording, from its beginning again at its end.

    The loss may differ from that of the recorded run: scores are aligned again. Samples without an
    aligned token are dropped and counted.

    Raises:
        ConfigError: if the data, the student's tokenizer or the scoring options differ.
        CheckpointError: if there is no recording.
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
        self._selection = TokenSelection(student.table, config.tokens, config.rollout.temperature)
        if recording.data_fingerprint != identity.data_fingerprint:
            raise ConfigError(
                f"{recording.folder}: data.prompts differs (found "
                f"{identity.data_fingerprint[:12]}, expected {recording.data_fingerprint[:12]}). "
                "Set the data of the recorded run",
                key="data.prompts",
            )
        if recording.student_tokenizer != student.table.fingerprint:
            raise ConfigError(
                f"{recording.folder}: tokenizer of student.model differs (found "
                f"{student.table.fingerprint[:12]}, expected {recording.student_tokenizer[:12]}). "
                "Use a student with the same tokenizer",
                key="student.model",
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
        """Create the run's replay; None without ``replay``."""
        if config.replay is None:
            return None
        return cls(Recording(config.replay), config, identity, prompts, student, cache)

    async def collect(self, step: int, clock: StepTimer) -> tuple[list[TrainingExample], Metrics]:
        """Return the examples of a step, counted from 0.

        Raises:
            CheckpointError: if the step cannot be loaded.
        """
        number = step % self._recording.steps + 1
        with clock.phase("sample"):
            samples = self._recording.read(number, self._prompts, self._student)
        examples: list[TrainingExample] = []
        for sample in samples:
            scores = [self._align(score, sample.rollout) for score in sample.scores]
            aligned_scores = tuple(score for score in scores if score is not None)
            if len(aligned_scores) == len(scores):
                examples.append(TrainingExample(sample.rollout, aligned_scores))
        unaligned = float(len(samples) - len(examples))
        return examples, {"dropped/nothing_aligned": unaligned, "dropped/total": unaligned}

    def _teacher(
        self, name: str, config: RunConfig, student: StudentIdentity, cache: ProjectionCache
    ) -> Teacher:
        if name not in config.scoring_teachers:
            raise ConfigError(
                f"{self._recording.folder}: teacher {name!r} of the recording not found in the run."
                " Add it under teachers, with its loss",
                key=f"teachers.{name}",
            )
        settings = config.scoring_teachers[name]
        facts = self._recording.teacher(name)
        facts.require_options(name, scoring_options(settings), "the recording")
        return teacher_of(name, settings, facts.manifest, facts.tokenizer(name), student, cache)

    def _align(self, recorded: RecordedScore, rollout: Rollout) -> AlignedScore | None:
        teacher, score = self.teachers[recorded.teacher], recorded.score
        sent = rollout
        if recorded.sent_tokens is not None:
            sent = first_tokens(rollout, recorded.sent_tokens, self._student)
        teacher_input = input_for(teacher, sent, self._student)
        alignment = aligned(teacher, teacher_input, score)
        if not len(alignment):
            return None
        lookaheads = recorded.lookaheads if teacher.lookaheads else None
        example = AlignedScore(
            recorded.teacher, recorded.weight, teacher_input, score, alignment, lookaheads
        )
        return self._selection.selected(rollout, example)
