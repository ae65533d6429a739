"""``EvaluationConfig``: held-out prompts that are completed and graded during a run."""

import re
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, field_validator, model_validator

from mopd_trainer.config.settings import Settings, invalid

#: Graders with a name; ``evaluation.graders`` has a row for each, except ``log_likelihood``.
GraderName = Literal[
    "exact", "normalized", "regex", "last_number", "choice", "json_equal", "log_likelihood"
]
#: A user's function: ``python:module:function``.
_FUNCTION = re.compile(r"python:[\w.]+:\w+")
_SET_NAME = re.compile(r"[\w.-]+")


class EvaluationSetConfig(Settings):
    """Held-out prompts with reference answers, and how completions are graded."""

    prompts: Path
    """File, as ``data.prompts``; with ``split``, a dataset of Hugging Face."""
    split: str | None = None
    """Split of a dataset, as ``data.split``."""
    subset: str | None = None
    """Configuration of the dataset on the hub, as ``data.subset``."""
    question_key: str | None = None
    """Key of the user message, or of a list of messages, as ``data.question_key``."""
    answer_key: str | None = None
    """Key of the reference answer. Default: as ``data.answer_key``."""
    ignored_keys: tuple[str, ...] = ()
    """Keys that change prompts (``tools``, ``images``, ``system``) and that the set does not use.
    Other keys are never invalid."""
    source_key: str | None = None
    """Key of a line's data source, for results by source. Default: the first of ``data_source``,
    ``dataset``, ``tag`` in the line."""
    grader: str = "exact"
    """``exact`` (same text), ``normalized`` (without case, punctuation, articles, repeated
    spaces), ``regex`` (last match of ``pattern``), ``last_number``, ``choice`` (a letter),
    ``json_equal``, ``python:module:function`` (a function of prompt and completion that returns a
    score from 0 to 1), or ``log_likelihood``: bits per byte of the reference answer, without
    generation."""
    pattern: str | None = None
    """Regular expression of grader ``regex``: its last match in the completion, or its first group,
    is compared with the reference answer."""
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

    @field_validator("grader")
    @classmethod
    def _validate_grader(cls, grader: str) -> str:
        if grader not in get_args(GraderName) and not _FUNCTION.fullmatch(grader):
            raise ValueError(
                f"unknown grader, expected {', '.join(get_args(GraderName))} or "
                "python:module:function"
            )
        return grader

    @model_validator(mode="after")
    def _validate_pattern(self) -> "EvaluationSetConfig":
        if (self.grader == "regex") != (self.pattern is not None):
            raise invalid("pattern", "must be set if and only if grader is 'regex'")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise invalid("pattern", f"invalid regular expression: {error}") from error
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
