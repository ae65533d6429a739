"""Sets are read in every format of data; errors name the settings of the set."""

from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.errors import DataError
from mopd_trainer.config.evaluation import EvaluationConfig
from mopd_trainer.evaluation.sets import EvaluationSet, read_sets
from tests.trainer.data.test_formats import REFERENCE, ROWS, SYSTEM, USER, texts
from tests.trainer.runs import write_lines


def read(folder: Path, row: dict[str, Any], **settings: Any) -> EvaluationSet:
    path = write_lines(folder / "set.jsonl", [row])
    values = {"every": 1, "sets": {"held_out": {"prompts": path, **settings}}}
    [each] = read_sets(EvaluationConfig.model_validate(values))
    return each


@pytest.mark.parametrize(("name", "row", "settings"), ROWS)
def test_set_of_every_format(
    tmp_path: Path, name: str, row: dict[str, Any], settings: dict[str, Any]
) -> None:
    each = read(tmp_path, row, **settings)
    [prompt] = each.prompts
    assert (prompt.format, texts(prompt)) == (name, [("system", SYSTEM), ("user", USER)])
    assert each.references == (REFERENCE,)
    assert prompt.metadata == row


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"prompt": USER, "completion": REFERENCE, "tools": [1]}, "ignored_keys=[tools]"),
        ({"query": USER, "response": REFERENCE}, "question_key=query"),
        ({"prompt": " ", "completion": REFERENCE}, ""),
        ({"prompt": USER, "completion": 5}, ""),
    ],
)
def test_error_names_settings_that_a_set_has(
    tmp_path: Path, row: dict[str, Any], settings: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, row)
    assert settings == "" or f" evaluation.sets.held_out.{settings}" in str(caught.value)
    assert "on_bad_line" not in str(caught.value)
    assert " data." not in str(caught.value)
