"""A run that corrects completions: its metrics, its recording, and a replay of it."""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from mopd_trainer.config.run import RunConfig
from mopd_trainer.data.prompts import read_prompts
from mopd_trainer.metrics.table import NOT_REPRODUCED, is_reproduced
from mopd_trainer.run_folder.recordings.recording import Recording
from tests import tiny_models
from tests.server.tiny_teachers import teacher_of
from tests.trainer.in_process import Recorded, serve_in_process
from tests.trainer.runs import prompt_lines, run_values, write_lines
from tests.trainer.students import model_of, table, tokenizer
from tests.trainer.whole_runs import assert_same_weights, journal, run_here


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    transport = Recorded(teacher_of(model_of("qwen", seed=1, sharpness=8), tokenizer("digit")).app)
    serve_in_process(monkeypatch, {"own": transport})
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(4, ["own"]))
    folder = tiny_models.save(model_of("qwen"), tokenizer("digit"), tmp_path / "student")
    values = run_values(tmp_path, max_steps=2)
    values["student"] |= {"model": str(folder)}
    values["rollout"] |= {"corrections": 2, "correction_ratio": 0.3, "correction_significance": 100}
    values["logging"] = {"tensorboard": False, "record": True, "completions": 4}
    values["teachers"] = {"own": {"url": "http://own", "top_k": 8}}
    return values


def test_corrected_completions_are_counted_logged_recorded_and_replayed(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    live, console = run_here(values)
    output = Path(values["output_dir"])
    assert "corrected at most 2 times" in console
    shares = [line["rollout/corrected_share"] for line in journal(output)]
    assert min(shares) > 0

    prompts = read_prompts(RunConfig.model_validate(values).data, ["own"])
    samples = Recording(output).read(1, prompts, table("digit"))
    corrected = [sample.rollout.corrected_tokens for sample in samples]
    assert sum(map(bool, corrected)) == shares[0] * len(samples)
    # Only corrections needed these.
    assert {sample.rollout.student_topk_ids is None for sample in samples} == {True}
    logged = map(json.loads, (output / "completions.jsonl").read_text().splitlines())
    positions = [tuple(line["corrected_tokens"]) for line in logged if line["step"] == 1]
    assert sorted(positions) == sorted(corrected)

    again = {
        **values,
        "output_dir": str(tmp_path / "replay"),
        "replay": values["output_dir"],
        "logging": {"tensorboard": False},
    }
    replayed, _ = run_here(again)
    assert_same_weights(replayed, live)
    assert journal(tmp_path / "replay")[0]["rollout/corrected_share"] == shares[0]


def test_two_identical_runs_differ_in_the_documented_metrics_only(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        run_here(values, output_dir=str(folder))
    first, second = (journal(folder) for folder in folders)
    names = {name for line in first for name in line}
    assert [line.keys() for line in first] == [line.keys() for line in second]
    for line, other in zip(first, second, strict=True):
        assert [n for n in names if line.get(n) != other.get(n) and is_reproduced(n)] == []
    matched = {
        pattern: {name for name in names if fnmatchcase(name, pattern)}
        for pattern in NOT_REPRODUCED
    }
    of_replicas = {"teacher/*/replicas", "teacher/*/busiest_replica"}
    assert {pattern for pattern in NOT_REPRODUCED if not matched[pattern]} == of_replicas
    times = [line["teacher/own/score_seconds_total"] for line in (*first, *second)]
    assert len(set(times)) > 1


def test_the_documentation_lists_what_is_not_reproduced() -> None:
    text = (Path(__file__).parents[3] / "trainer" / "README.md").read_text()
    [sentence] = [line for line in text.splitlines() if "bit for bit, except" in line]
    assert set(re.findall(r"`([a-z]+/[\w*/]+)`", sentence)) == set(NOT_REPRODUCED)
