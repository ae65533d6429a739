"""Runs that train a part of the tokens: what teachers score, metrics, and a replay."""

from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.server.tiny_teachers import teacher_of
from tests.trainer.in_process import Recorded, serve_in_process
from tests.trainer.runs import prompt_lines, run_values, write_lines
from tests.trainer.students import model_of, tokenizer
from tests.trainer.whole_runs import assert_same_weights, journal, run_here


@pytest.fixture
def teachers() -> dict[str, Recorded]:
    own = teacher_of(model_of("qwen", seed=1, sharpness=4), tokenizer("digit"))
    other = teacher_of(model_of("llama", seed=2, sharpness=4), tokenizer("whole_number"))
    return {"own": Recorded(own.app), "other": Recorded(other.app)}


@pytest.fixture
def values(
    tmp_path: Path, teachers: dict[str, Recorded], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    serve_in_process(monkeypatch, teachers)
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(6, ["own", "other"]))
    folder = tiny_models.save(model_of("qwen"), tokenizer("digit"), tmp_path / "student")
    values = run_values(tmp_path)
    values["student"] |= {"model": str(folder)}
    values["logging"] = {"tensorboard": False, "record": True, "completions": 2}
    values["teachers"] = {name: {"url": "http://teacher", "top_k": 8} for name in teachers}
    return values


@pytest.mark.parametrize(
    "tokens",
    [
        {"first": 3},
        {"share": 0.5},
        {"share": 0.5, "by": "prefix_entropy"},
        {"share": 0.5, "by": "divergence"},
    ],
)
@pytest.mark.parametrize("corrections", [0, 1])
def test_selected_tokens_are_scored_recorded_and_replayed(
    tmp_path: Path,
    values: dict[str, Any],
    teachers: dict[str, Recorded],
    tokens: dict[str, Any],
    corrections: int,
) -> None:
    values["tokens"] = tokens
    values["rollout"] |= {"corrections": corrections}
    live, _ = run_here(values)
    lines = journal(Path(values["output_dir"]))
    for line in lines:
        selected = line["teacher/own/tokens"] + line["teacher/other/tokens"]
        assert 0 < selected < line["rollout/tokens"]
        assert line["teacher/own/compared_share"] == pytest.approx(1)
        assert line["compared_share"] == pytest.approx(1, abs=0.4)
    if "first" in tokens and not corrections:
        sequences = teachers["own"].sequences
        assert max(len(each["completion_token_ids"]) for each in sequences) == 3
        ended = [each for each in sequences if each.get("finished")]
        assert all(len(each["completion_token_ids"]) < 3 for each in ended)
    replay = {
        **values,
        "output_dir": str(tmp_path / "replay"),
        "replay": values["output_dir"],
        "logging": {"tensorboard": False},
    }
    replayed, _ = run_here(replay)
    assert_same_weights(replayed, live)
    other, _ = run_here(replay, output_dir=str(tmp_path / "rest"), tokens={"first": 1})
    with pytest.raises(AssertionError):
        assert_same_weights(other, live)
