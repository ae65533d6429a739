"""Every grader, by completions that it accepts and completions that it rejects."""

from pathlib import Path
from typing import Any, get_args

import pytest

from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.samples import Message, Prompt
from mopd_trainer.config.evaluation import EvaluationSetConfig
from mopd_trainer.config.grading import GraderName
from mopd_trainer.evaluation.graders import GRADERS, grader_of

PROMPT = Prompt(index=0, messages=(Message(role="user", content="?"),), teachers={})

CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "exact": ("72", ["72"], [" 72", "72.", "7"]),
    "normalized": ("The Walnut tree", ["walnut  tree.", "a walnut tree"], ["walnut trees", ""]),
    "last_number": (
        "18 + 54 = 1,072 #### 1,072",
        ["so 1072", "1072.00 dollars", "of 3, 1,072."],
        ["-1072", "1072 or 5", "none", "5-1073"],
    ),
    "choice": (
        "B",
        ["B", "(B)", "The choice is B.", "**Choice:** (B)", "B) because", "A is wrong. Option B"],
        ["C", "b", "", "The choice is (C), not B"],
    ),
    "json_equal": (
        {"a": [1, 2.0]},
        ['{"a": [1, 2]}', '```json\n{"a":\n[1.0,2]}\n```'],
        ['{"a": [2, 1]}', "{'a': [1, 2]}", "{"],
    ),
}


def grade(reference: Any, completion: str, *, finished: bool = True, **config: Any) -> float:
    values = EvaluationSetConfig(prompts=Path("x.jsonl"), **config)
    return grader_of(values, key="evaluation.sets.x")(PROMPT, reference, completion, finished)


@pytest.mark.parametrize("name", CASES)
def test_a_grader_accepts_and_rejects(name: str) -> None:
    reference, right, wrong = CASES[name]
    assert {text for text in [*right, *wrong] if grade(reference, text, grader=name)} == {*right}
    assert bool(grade(reference, right[0], grader=name, finished=False)) != GRADERS[name].whole


def test_every_name_has_a_grader() -> None:
    special = {"regex", "log_likelihood"}
    assert {*get_args(GraderName)} == {*GRADERS, *special} == {*CASES, *special}


def test_the_last_match_of_a_pattern_is_compared() -> None:
    settings = {"grader": "regex", "pattern": r"x = (\w+)"}
    assert grade(7, "x = 3, then x = 7", **settings) == 1
    assert grade("3", "x = 3, then x = 7", **settings) == 0
    assert grade("3", "y = 3", **settings) == 0


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"grader": "regex"}, "pattern"),
        ({"grader": "regex", "pattern": "("}, "pattern"),
        ({"grader": "exact", "pattern": "x"}, "pattern"),
        ({"greedy": False, "samples": 0}, "samples"),
        ({"grader": "bleu"}, None),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], key: str | None) -> None:
    with pytest.raises(ValueError, match=key or "bleu"):
        EvaluationSetConfig(prompts=Path("x.jsonl"), **settings)


def test_a_function_of_the_user_grades(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_graders.py").write_text(
        "def length(prompt, completion):\n    return len(completion) / 10 + prompt.index\n"
    )
    monkeypatch.chdir(tmp_path)
    grader = "python:my_graders:length"
    assert grade(None, "12345", grader=grader) == 0.5
    with pytest.raises(DataError) as wrong:
        grade(None, "12345678901", grader=grader)
    for missing in ("python:my_graders:width", "python:no_such_module:width"):
        with pytest.raises(ConfigError) as caught:
            grade(None, "", grader=missing)
        assert caught.value.key == "evaluation.sets.x.grader"
    assert wrong.value.key == "evaluation.sets.x.grader"
