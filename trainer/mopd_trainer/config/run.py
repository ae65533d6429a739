"""``RunConfig``: all settings of a run. Imports no torch, so that errors are raised quickly."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from mopd_losses.config import ON_SAMPLES
from mopd_trainer.config.data import DataConfig
from mopd_trainer.config.degradation import DegradationConfig
from mopd_trainer.config.evaluation import (
    EvaluationConfig,
    EvaluationSetConfig,
    require_valid_evaluation,
)
from mopd_trainer.config.logs import LoggingConfig
from mopd_trainer.config.loss_samples import require_valid_samples
from mopd_trainer.config.resources import ResourcesConfig, require_valid_resources
from mopd_trainer.config.rewards import (
    ReinforcementConfig,
    RewardConfig,
    require_valid_rewards,
)
from mopd_trainer.config.rollout import RolloutConfig, VllmConfig
from mopd_trainer.config.settings import (
    UNWEIGHTED,
    ImportanceConfig,
    Incidental,
    LossAverage,
    Settings,
    invalid,
)
from mopd_trainer.config.student import LoraConfig, StudentConfig
from mopd_trainer.config.teacher import ScoreCacheConfig, TeacherConfig, student_topk
from mopd_trainer.config.teacher_requirements import (
    require_reference_answers,
    require_revisions,
    require_valid_fallbacks,
    require_valid_local_teachers,
    with_student,
)
from mopd_trainer.config.tokens import TokensConfig

__all__ = [
    "DataConfig",
    "DegradationConfig",
    "EvaluationConfig",
    "EvaluationSetConfig",
    "LoggingConfig",
    "LoraConfig",
    "ReinforcementConfig",
    "ResourcesConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "ScoreCacheConfig",
    "StudentConfig",
    "TeacherConfig",
    "TokensConfig",
    "VllmConfig",
]

#: The student's most likely ids that are kept at each token for its entropy.
_ENTROPY_CANDIDATES = 20


class RunConfig(Settings):
    """Settings of a run. Unknown keys are rejected.

    Rejected: cross entropy on rollouts, distillation without a teacher, and losses on samples for
    teachers that score reference answers.
    """

    exp_name: Incidental[str] = "mopd"
    """Name of the run in logs and trackers."""
    seed: int = Field(default=0, ge=0)
    """Seed of the data order and of sampling."""
    output_dir: Incidental[Path]
    """Folder of the run: journal, checkpoints, report and trained model (``final``)."""
    max_steps: int = Field(ge=1)
    """Number of optimizer steps, until which the learning rate decays; may change on resume."""
    save_steps: Incidental[int] = Field(default=0, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: Incidental[int | None] = Field(default=2, ge=0)
    """Number of most recent checkpoints to keep; 0 or ``null``: all. With 2, a run whose latest
    checkpoint is damaged resumes from the one before. One more exists while a checkpoint is being
    saved. Each takes 12 bytes per trained parameter."""
    best_checkpoint_metric: Incidental[str | None] = None
    """Metric of the journal (``evaluation/sums/accuracy``, ``loss``). The checkpoint with the best
    mean of the metric since the previous checkpoint (of an evaluation: with the best last value) is
    kept too."""
    best_checkpoint_mode: Incidental[Literal["min", "max"] | None] = None
    """Direction of ``best_checkpoint_metric``. Default: ``max`` for an evaluation, except for
    ``bits_per_byte``; else ``min``."""
    logging_steps: Incidental[int] = Field(default=1, ge=1)
    """Steps between lines on the console."""
    resume_from_checkpoint: Incidental[bool | Path] = False
    """``true``: resume from the latest checkpoint in ``output_dir``, or start, with a warning, if
    there is none, so that one command line starts and restarts a run; a path: resume from this
    checkpoint."""
    teacher_wait_seconds: Incidental[float] = Field(default=60.0, gt=0)
    """Maximum time to wait until the teachers are ready."""
    accept_changed_teachers: Incidental[bool] = False
    """Resume although the manifest of a teacher differs from the checkpoint's."""
    accept_changed_settings: Incidental[bool] = False
    """Resume although the data, the seed or a setting that affects training differs from the
    checkpoint's."""
    projection_cache: Incidental[Path | None] = None
    """Folder of built projections and of prefix KL's tables (at most 40 MB for two tokenizers),
    which runs may share. Default: a folder in ``output_dir``."""
    score_cache: Incidental[ScoreCacheConfig | None] = None
    """Folder of stored teacher scores, or ``{path, max_gigabytes}``. Default: scores are not
    stored."""
    replay: Path | None = None
    """``output_dir`` of a run with ``logging.record``: train on the recorded completions and
    scores, with any loss, without contacting teachers."""
    data: DataConfig
    """Prompts and reference answers."""
    student: StudentConfig
    """Model and optimizer."""
    rollout: RolloutConfig
    """Sampling."""
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Teachers by name. Default: none, for plain SFT, or for ``rewards`` only."""
    rewards: dict[str, RewardConfig] = Field(default_factory=dict)
    """Rewards of sampled completions by name, trained with the teachers' losses, or without
    teachers; they grade what ``rollout.samples_per_prompt`` samples. Default: none."""
    reinforcement: ReinforcementConfig = ReinforcementConfig()
    """Estimator of the gradient of ``rewards``."""
    evaluation: Incidental[EvaluationConfig | None] = None
    """Held-out prompts that the student completes during the run. Default: no evaluation."""
    tokens: TokensConfig = TokensConfig()
    """Tokens of sampled completions that teachers score and their losses train. Default: all;
    ``rollout.truncated`` drops completions without an end."""
    loss_average: LossAverage = "tokens"
    """Average of the loss of a step: every completion token, every sample, or every teacher with a
    sample in the step counts the same. With ``tokens``, teachers whose completions are long have
    most of the gradient."""
    importance_weights: ImportanceConfig = ImportanceConfig()
    """Weights of sampled tokens by the text before them: behind text that a teacher finds
    implausible, a token weighs less."""
    stop_on_degradation: Incidental[bool] = True
    """End the run, with a checkpoint, when the student degrades gravely by ``degradation``: its
    samples leave what the loss compares, are no text, or end too early."""
    degradation: Incidental[DegradationConfig] = DegradationConfig()
    """Thresholds of warnings about a degrading student and of the end of the run."""
    logging: Incidental[LoggingConfig] = LoggingConfig()
    """Logs, trackers and recordings."""
    resources: Incidental[ResourcesConfig | None] = None
    """Devices of a Ray cluster. Default: this process, or the ranks of ``torchrun``."""

    @model_validator(mode="before")
    @classmethod
    def _normalize_score_cache(cls, values: object) -> object:
        if isinstance(values, dict) and isinstance(values.get("score_cache"), str | Path):
            return {**values, "score_cache": {"path": values["score_cache"]}}
        return values

    @model_validator(mode="after")
    def _set_self_teachers(self) -> "RunConfig":
        """Give self-teachers the student's model, and score after sampling by default."""
        teachers = {n: with_student(n, each, self.student) for n, each in self.teachers.items()}
        object.__setattr__(self, "teachers", teachers)  # the model is frozen
        if any(teacher.kind == "self" for teacher in teachers.values()):
            self._set_rollout_default("scoring", "after_rollout")
        return self

    @model_validator(mode="after")
    def _validate_teachers(self) -> "RunConfig":
        known = ", ".join(sorted(self.teachers)) or "no teacher"
        default = self.data.default_teacher
        if default is not None and default not in self.teachers:
            raise invalid(
                "data.default_teacher", f"unknown teacher (found {default!r}, expected {known})"
            )
        if self.needs_teachers and not self.teachers:
            raise invalid(
                "teachers",
                "no teacher to score completions. Add a teacher or rewards, or, for plain SFT, "
                "set data.source to 'answers' and student.distill_loss_weight to 0.",
            )
        require_valid_fallbacks(self.teachers)
        require_reference_answers(self.teachers, self.data.rollout_share)
        if self.score_cache is not None:
            require_revisions(self.teachers)
        return self

    @model_validator(mode="after")
    def _validate_resources(self) -> "RunConfig":
        require_valid_resources(
            self.resources,
            self.teachers,
            sharding=self.student.sharding,
            sampled=self.samples_rollouts,
        )
        return self

    @model_validator(mode="after")
    def _set_temperature(self) -> "RunConfig":
        """Sample from the unmodified distribution by default where a loss is an estimate over
        it."""
        if self._trains_on_samples:
            self._set_rollout_default("temperature", 1.0)
        return self

    @model_validator(mode="after")
    def _set_corrections(self) -> "RunConfig":
        """Correct no samples by default where these have to be the student's own, where scores are
        not a teacher's, and where corrections were not measured or cost more."""
        rollout = self.rollout
        uncorrected = (
            self._trains_on_samples
            or any(teacher.control for teacher in self.teachers.values())
            or rollout.engine != "transformers"
            or rollout.scoring == "after_rollout"
        )
        if uncorrected:
            self._set_rollout_default("corrections", 0)
        return self

    def _set_rollout_default(self, name: str, value: float | str) -> None:
        """Set a setting of the rollout that the configuration does not have."""
        if name not in self.rollout.model_fields_set:
            rollout = self.rollout.model_copy(update={name: value})
            object.__setattr__(self, "rollout", rollout)  # the model is frozen

    @model_validator(mode="after")
    def _validate_losses(self) -> "RunConfig":
        for name, teacher in self.teachers.items():
            require_valid_samples(
                name,
                teacher,
                self.rollout,
                sampled=self.samples_rollouts,
                references=self.scores_reference_answers,
                source=self.data.source,
            )
        if self.student.distill_loss_weight < 1 and not self.data.uses_reference_answers:
            raise invalid(
                "student.distill_loss_weight",
                "cross entropy on samples of the student would only reinforce them (found "
                f"{self.student.distill_loss_weight:g} and data.source 'rollout'). Set "
                "data.source to 'answers', or the weight to 1.",
            )
        return self

    @model_validator(mode="after")
    def _validate_rewards(self) -> "RunConfig":
        require_valid_rewards(
            self.rewards,
            self.rollout,
            sampled=self.data.rollout_share > 0,
            taught=bool(self.teachers),
        )
        return self

    @model_validator(mode="after")
    def _validate_support(self) -> "RunConfig":
        if not student_topk(self.teachers):
            return self
        name = next(name for name, t in self.teachers.items() if t.support == "student_topk")
        if self.scores_reference_answers:
            raise invalid(
                f"teachers.{name}.support",
                "'student_topk' is not available for reference answers. Set it to 'teacher_topk', "
                "or data.source to 'rollout'.",
            )
        if self.rollout.engine != "transformers" and self.rollout.top_p < 1:
            raise invalid(
                f"teachers.{name}.support",
                f"engine {self.rollout.engine!r} returns no ids outside the nucleus, so "
                f"'student_topk' is incomplete (found rollout.top_p {self.rollout.top_p:g}, "
                "expected 1). Set top_p to 1, or rollout.engine to 'transformers'.",
            )
        return self

    @model_validator(mode="after")
    def _validate_local_teachers(self) -> "RunConfig":
        require_valid_local_teachers(
            self.teachers,
            self.rollout,
            recorded=self.logging.record or self.replay is not None,
            ranks=1 if self.resources is None else self.resources.student,
        )
        return self

    @model_validator(mode="after")
    def _validate_evaluation(self) -> "RunConfig":
        sets = {} if self.evaluation is None else self.evaluation.sets
        require_valid_evaluation(
            {name: self.evaluated_teachers(name) for name in sets},
            self.contacted_teachers,
            self.best_checkpoint_metric or "",
        )
        return self

    @model_validator(mode="after")
    def _validate_replay(self) -> "RunConfig":
        if self.replay is not None and self.logging.record:
            raise invalid(
                "logging.record", "a replay cannot be recorded again. Remove replay or this."
            )
        return self

    @property
    def importance(self) -> ImportanceConfig:
        """The importance weights, or none by default with a loss of the sampled tokens."""
        weights = self.importance_weights
        return UNWEIGHTED if self._distills_samples and weights.least is None else weights

    @property
    def _trains_on_samples(self) -> bool:
        """True if a loss or a reward is an estimate by the tokens that the student sampled."""
        return bool(self.rewards) or self._distills_samples

    @property
    def _distills_samples(self) -> bool:
        """True if the loss of a teacher is an estimate by the sampled tokens."""
        return any(
            isinstance(teacher.loss, ON_SAMPLES) or teacher.control == "constant_negative"
            for teacher in self.teachers.values()
        )

    @property
    def kept_topk(self) -> int:
        """Most likely ids of the student to keep at each sampled token; 0 for none."""
        entropy = _ENTROPY_CANDIDATES if self.tokens.keeps_entropies else 0
        topk = student_topk(self.scoring_teachers)
        return max(self.rollout.correction_candidates, topk, entropy)

    @property
    def samples_rollouts(self) -> bool:
        """True if the student samples completions."""
        return self.data.rollout_share > 0 and self.replay is None

    def is_logged(self, steps: int) -> bool:
        """Return True if the last of ``steps`` steps is logged on the console."""
        return steps % self.logging_steps == 0 or steps == self.max_steps

    def logs_completions(self, steps: int) -> bool:
        """Return True if completions of the last of ``steps`` steps are saved."""
        return bool(self.logging.completions) and (steps == 1 or self.is_logged(steps))

    @property
    def scores_reference_answers(self) -> bool:
        """True if teachers score reference answers."""
        return self.data.uses_reference_answers and self.student.distill_loss_weight > 0

    @property
    def needs_teachers(self) -> bool:
        """True if any completion is scored."""
        scores_rollouts = bool(self.teachers) or not self.rewards
        return (self.data.rollout_share > 0 and scores_rollouts) or self.scores_reference_answers

    @property
    def reward_keys(self) -> tuple[str, ...]:
        """Keys of the data that only rewards read."""
        return tuple(each.answer_key for each in self.rewards.values() if each.answer_key)

    @property
    def scoring_teachers(self) -> dict[str, TeacherConfig]:
        """Teachers that score completions; empty for plain SFT."""
        return self.teachers if self.needs_teachers else {}

    @property
    def contacted_teachers(self) -> dict[str, TeacherConfig]:
        """Teachers that receive requests; empty for plain SFT and for a replay."""
        return self.scoring_teachers if self.replay is None else {}

    def evaluated_teachers(self, name: str) -> tuple[str, ...]:
        """Return the teachers that are evaluated on a set of ``evaluation.sets``."""
        if self.evaluation is None:
            return ()
        running = (n for n, each in self.contacted_teachers.items() if each.placement != "stored")
        return self.evaluation.teachers_of(name, tuple(running))

    @property
    def maximizes_best_metric(self) -> bool:
        """True if a larger ``best_checkpoint_metric`` is better."""
        metric = self.best_checkpoint_metric or ""
        if self.best_checkpoint_mode is None:
            return metric.startswith("evaluation/") and not metric.endswith("bits_per_byte")
        return self.best_checkpoint_mode == "max"

    @property
    def projection_folder(self) -> Path:
        """Folder of built projections."""
        return self.projection_cache or self.output_dir / "projections"
