"""``GRADERS``: the table of graders, each a function of completion and reference answer."""

import json
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Prompt
from mopd_trainer.config.grading import GraderConfig
from mopd_trainer.config.rewards import RewardConfig
from mopd_trainer.config.user_functions import import_function

#: (prompt, reference answer, completion, finished) -> score from 0 to 1.
Grade = Callable[[Prompt, Any, str, bool], float]

_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d[\d,]*(?:\.\d+)?")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_FENCE = re.compile(r"\A\s*```\w*\n(.*?)\n?```\s*\Z", re.DOTALL)
#: Most specific first; the last match of the first pattern that matches is the choice.
_CHOICES = (
    re.compile(r"\A\W*([A-Z])\W*\Z"),
    re.compile(r"(?i:[a]nswer|choice|option)(?:\s+is)?\W*([A-Z])\b"),
    re.compile(r"\(([A-Z])\)"),
    re.compile(r"^\s*([A-Z])[.):]", re.MULTILINE),
    re.compile(r"\b([A-Z])\b"),
)


@dataclass(frozen=True)
class Grader:
    """A row of ``GRADERS``."""

    equal: Callable[[str, Any], bool]
    """(completion, reference answer) -> True if the completion is correct."""
    whole: bool
    """The completion is compared completely: one without an ending token is wrong."""


def _exact(completion: str, reference: Any) -> bool:
    return completion == str(reference)


def _normalized(completion: str, reference: Any) -> bool:
    return _normal_form(completion) == _normal_form(str(reference))


def _normal_form(text: str) -> str:
    """Remove case, punctuation, articles and repeated spaces, as in SQuAD (arXiv 1606.05250)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _last_number(completion: str, reference: Any) -> bool:
    number, expected = _number(completion), _number(str(reference))
    return number is not None and number == expected


def _number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _choice(completion: str, reference: Any) -> bool:
    letter = _letter(completion)
    return letter is not None and letter == _letter(str(reference))


def _letter(text: str) -> str | None:
    matches = (pattern.findall(text) for pattern in _CHOICES)
    return next((letters[-1] for letters in matches if letters), None)


def _json_equal(completion: str, reference: Any) -> bool:
    fenced = _FENCE.match(completion)
    try:
        value = json.loads(fenced[1] if fenced else completion)
        expected = json.loads(reference) if isinstance(reference, str) else reference
    except (ValueError, RecursionError):
        return False
    return value == expected


def _search(completion: str, reference: Any, pattern: str) -> bool:
    matches = [*re.finditer(pattern, completion)]
    if not matches:
        return False
    last = matches[-1]
    return (last[1] if last.re.groups else last[0]) == str(reference)


#: ``grader`` -> how it compares; ``regex`` and functions are built by ``grader_of``.
GRADERS: Mapping[str, Grader] = {
    "exact": Grader(_exact, whole=True),
    "normalized": Grader(_normalized, whole=True),
    "last_number": Grader(_last_number, whole=False),
    "choice": Grader(_choice, whole=False),
    "json_equal": Grader(_json_equal, whole=True),
}


def grader_of(config: GraderConfig, *, key: str) -> Grade:
    """Return the grader of a set or a reward.

    Args:
        key: setting of the section in error messages.

    Raises:
        ConfigError: if a user's function cannot be imported.
    """
    if config.is_function:
        return _function(config.grader, key=f"{key}.grader")
    pattern = config.pattern
    if pattern is not None:
        row = Grader(lambda text, reference: _search(text, reference, pattern), whole=False)
    else:
        row = GRADERS[config.grader]

    def grade(prompt: Prompt, reference: Any, completion: str, finished: bool) -> float:
        del prompt
        return float((finished or not row.whole) and row.equal(completion, reference))

    return grade


def graders_of(rewards: Mapping[str, RewardConfig]) -> dict[str, Grade]:
    """Return the grader of each reward.

    Raises:
        ConfigError: if a user's function cannot be imported.
    """
    return {name: grader_of(config, key=f"rewards.{name}") for name, config in rewards.items()}


def _function(name: str, *, key: str) -> Grade:
    function = import_function(name, key=key)

    def grade(prompt: Prompt, reference: Any, completion: str, finished: bool) -> float:
        del reference, finished
        score = float(function(prompt, completion))
        if not 0 <= score <= 1:
            raise DataError(
                f"{key}: {name} returned an invalid score for prompt {prompt.index} (found "
                f"{score:g}, expected 0 to 1)",
                key=key,
            )
        return score

    return grade
