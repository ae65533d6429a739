"""A model of ``mopd evaluate`` that does not exist is named before anything is loaded."""

from pathlib import Path

import pytest

from mopd_protocol.errors import ConfigError
from mopd_trainer import RunConfig, evaluate
from tests.trainer.runs import prompt_lines, run_values, write_lines


def _config(folder: Path) -> RunConfig:
    held_out = write_lines(folder / "held_out.jsonl", [{"prompt": "1", "answer": "2"}])
    sets = {"sums": {"prompts": str(held_out), "answer_key": "answer", "grader": "exact"}}
    values = run_values(folder, evaluation={"every": 1, "sets": sets})
    write_lines(Path(values["data"]["prompts"]), prompt_lines(2))
    return RunConfig.model_validate(values)


@pytest.mark.parametrize("name", ["nowhere", "run"])
def test_a_folder_without_a_model_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "run" / "final").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        evaluate(tmp_path / name, _config(tmp_path))
    assert caught.value.key == "model"
    assert str(tmp_path / name) in str(caught.value)
