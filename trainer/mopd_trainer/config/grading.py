"""``GraderConfig``: how a completion is graded; shared by evaluation sets and rewards."""

import re
from typing import Literal, get_args

from pydantic import field_validator, model_validator

from mopd_trainer.config.settings import Settings, invalid
from mopd_trainer.config.user_functions import is_function_name

#: Graders with a name; ``evaluation.graders`` has a row for each, except ``log_likelihood``.
GraderName = Literal[
    "exact", "normalized", "regex", "last_number", "choice", "json_equal", "log_likelihood"
]


class GraderConfig(Settings):
    """A grader and where it finds the reference answer."""

    answer_key: str | None = None
    """Key of the reference answer. Default: as ``data.answer_key``."""
    grader: str = "exact"
    """``exact`` (same text), ``normalized`` (without case, punctuation, articles, repeated
    spaces), ``regex`` (last match of ``pattern``), ``last_number``, ``choice`` (a letter),
    ``json_equal``, ``python:module:function`` (a function of prompt and completion that returns a
    score from 0 to 1), or, for evaluation only, ``log_likelihood``: bits per byte of the
    reference answer, without generation."""
    pattern: str | None = None
    """Regular expression of grader ``regex``: its last match in the completion, or its first group,
    is compared with the reference answer."""

    @field_validator("grader")
    @classmethod
    def _validate_grader(cls, grader: str) -> str:
        if grader not in get_args(GraderName) and not is_function_name(grader):
            raise ValueError(
                f"unknown grader, expected {', '.join(get_args(GraderName))} or "
                "python:module:function"
            )
        return grader

    @model_validator(mode="after")
    def _validate_pattern(self) -> "GraderConfig":
        if (self.grader == "regex") != (self.pattern is not None):
            raise invalid("pattern", "must be set if and only if grader is 'regex'")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise invalid("pattern", f"invalid regular expression: {error}") from error
        return self

    @property
    def is_function(self) -> bool:
        """True for a user's function, which needs no reference answer."""
        return self.grader.startswith("python:")
