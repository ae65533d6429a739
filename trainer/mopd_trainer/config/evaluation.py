"""``EvaluationConfig``: held-out prompts that are completed and graded during a run."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from mopd_trainer.config.grading import GraderConfig
from mopd_trainer.config.settings import Settings, invalid
from mopd_trainer.config.teacher import TeacherConfig

_SET_NAME = re.compile(r"[\w.-]+")


class EvaluationSetConfig(GraderConfig):
    """Held-out prompts with reference answers, and how completions are graded."""

    prompts: Path
    """File, as ``data.prompts``; with ``split``, a dataset of Hugging Face."""
    split: str | None = None
    """Split of a dataset, as ``data.split``."""
    subset: str | None = None
    """Configuration of the dataset on the hub, as ``data.subset``."""
    question_key: str | None = None
    """Key of the user message, or of a list of messages, as ``data.question_key``."""
    ignored_keys: tuple[str, ...] = ()
    """Keys that change prompts (``tools``, ``images``, ``system``) and that the set does not use.
    Other keys are never invalid."""
    source_key: str | None = None
    """Key of a line's data source, for results by source. Default: the first of ``data_source``,
    ``dataset``, ``tag`` in the line."""
    greedy: bool = True
    """Complete each prompt greedily."""
    samples: int = Field(default=1, ge=0)
    """Completions sampled for each prompt, with the same seeds in each evaluation. From 2, pass@k
    is reported."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling threshold."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Maximum length of a completion. Default: ``rollout.max_new_tokens``."""
    limit: int | None = Field(default=None, ge=1)
    """Use the first prompts only. Default: all."""
    teachers: tuple[str, ...] | None = None
    """Teachers that are evaluated on this set. Default: those of ``evaluation.teachers``."""

    @model_validator(mode="after")
    def _validate_generation(self) -> "EvaluationSetConfig":
        if not self.greedy and not self.samples:
            raise invalid("samples", "nothing is generated (found greedy false and samples 0)")
        return self


class EvaluationConfig(Settings):
    """Evaluation of the student on held-out prompts, before the first step, every ``every`` steps
    and after the last one. It changes neither weights nor random numbers of the training."""

    every: int = Field(ge=1)
    """Steps between evaluations."""
    sets: dict[str, EvaluationSetConfig] = Field(min_length=1)
    """Sets of prompts by name."""
    teachers: bool | tuple[str, ...] = False
    """Evaluate the teachers once (all, or those named), before the first step, for the share of the
    gap that the student has closed. A service scores every prefix of its completion again, so that
    this takes a time quadratic in ``max_new_tokens``; a ``log_likelihood`` set takes one request
    per prompt."""

    @field_validator("sets")
    @classmethod
    def _validate_names(
        cls, sets: dict[str, EvaluationSetConfig]
    ) -> dict[str, EvaluationSetConfig]:
        for name in sets:
            if not _SET_NAME.fullmatch(name):
                raise ValueError(f"invalid name {name!r}, expected letters, digits, '_', '-', '.'")
        return sets

    def teachers_of(self, name: str, known: tuple[str, ...]) -> tuple[str, ...]:
        """Return the teachers that are evaluated on a set.

        Args:
            known: teachers of the run.
        """
        chosen = self.sets[name].teachers
        if chosen is None:
            chosen = self.teachers if isinstance(self.teachers, tuple) else known
        return chosen if self.teachers else ()


def require_valid_evaluation(
    sets: Mapping[str, Sequence[str]], teachers: Mapping[str, TeacherConfig], metric: str
) -> None:
    """Check the sets that settings name, and the teachers that are evaluated on them.

    Args:
        sets: set -> teachers that are evaluated on it.
        teachers: those that receive requests.
        metric: ``best_checkpoint_metric``.

    Raises:
        ConfigError: for an unknown set or teacher, and for a teacher that cannot generate.
    """
    if metric.startswith("evaluation/") and metric.split("/")[1] not in sets:
        raise invalid(
            "best_checkpoint_metric",
            f"unknown evaluation set (found {metric.split('/')[1]!r}, expected "
            f"{' or '.join(sorted(sets)) or 'an evaluation section'})",
        )
    for name, evaluated in sets.items():
        for teacher in evaluated:
            key = f"evaluation.sets.{name}.teachers"
            if teacher not in teachers:
                known = ", ".join(sorted(teachers)) or "no teacher"
                raise invalid(key, f"unknown teacher (found {teacher!r}, expected {known})")
            settings = teachers[teacher]
            if settings.support == "full" or settings.placement == "stored":
                cause = "support 'full'" if settings.support == "full" else "stored scores"
                raise invalid(
                    key,
                    f"teacher {teacher!r} has {cause} and cannot generate. Name the "
                    "other teachers in evaluation.teachers, or set it to false.",
                )
