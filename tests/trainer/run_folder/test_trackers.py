"""W&B and trackio: imported only if enabled; each step is logged once; runs are continued."""

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mopd_trainer.config.extras import require_packages
from mopd_trainer.config.run import RunConfig
from mopd_trainer.run_folder.journal import Journal
from mopd_trainer.run_folder.trackers import trackers_of
from tests.trainer.runs import run_values

#: A tracker that records its calls.
TRACKER = """
import json, pathlib
CALLS = pathlib.Path(__file__).with_suffix(".jsonl")
def record(*call):
    with CALLS.open("a") as file:
        file.write(json.dumps(call) + "\\n")
def init(**arguments): record("init", arguments)
def log(values, step): record("log", step, values)
def finish(): record("finish")
def Table(columns, data): return [dict(zip(columns, row, strict=True)) for row in data]
"""

#: Lines of ``logged_completion``, as far as trackers need them.
LINES = [
    {
        "step": 2,
        "source": "rollout",
        "prompt": [{"role": "user", "content": "2 + 2"}],
        "completion": "4",
        "teachers": {"sums": 1.0, "lists": 1.0},
        "nats": {"sums": [0.25, None, 0.75]},
    }
]


def config_of(folder: Path, **logging: Any) -> RunConfig:
    return RunConfig.model_validate(run_values(folder, exp_name="try", logging=logging))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_each_step_is_logged_and_a_resumed_run_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / f"{name}.py").write_text(TRACKER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    config = config_of(tmp_path, **{name: True}, project="project", tensorboard=False)
    require_packages(config)
    for step in (1, 2):  # the second one is resumed
        trackers = trackers_of(config)
        with Journal(
            config.output_dir, from_step=step - 1, tensorboard=False, trackers=trackers
        ) as journal:
            journal.write(step, {"loss": step / 2, "ratio": float("nan")})
            journal.write_completions(LINES[: step - 1])
    monkeypatch.delitem(sys.modules, name)
    calls = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    *_, table, _ = calls
    assert [line[0] for line in calls] == ["init", "log", "finish", "init", "log", "log", "finish"]
    calls.remove(table)
    row = {"step": 2, "source": "rollout", "prompt": "2 + 2", "completion": "4"}
    assert table[1:] == [
        2,
        {
            "completions": [
                row | {"teacher": "sums", "nats_per_token": 0.5},
                row | {"teacher": "lists", "nats_per_token": None},
            ]
        },
    ]
    assert [line[1:] for line in calls if line[0] == "log"] == [
        [1, {"loss": 0.5}],
        [2, {"loss": 1}],
    ]
    first, second = (line[1] for line in calls if line[0] == "init")
    assert first == second
    assert first["project"] == "project"
    assert first["resume"] == "allow"
    assert first["name"].startswith("try")
    assert first["config"]["max_steps"] == config.max_steps
    other = config_of(tmp_path / "other", **{name: True})
    monkeypatch.delitem(sys.modules, name, raising=False)
    trackers_of(other)
    *_, (_, third) = map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())
    assert (third.get("id"), third["name"]) != (first.get("id"), first["name"])


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_package_stores_the_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """For an environment with the packages; those of ``trackio`` exclude the newest pillow."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delitem(sys.modules, name, raising=False)
    pytest.importorskip(name)
    config = config_of(tmp_path, **{name: True}, project="project", tensorboard=False)
    trackers = trackers_of(config)
    with Journal(config.output_dir, from_step=0, tensorboard=False, trackers=trackers) as journal:
        journal.write(1, {"loss": 0.5})
        journal.write_completions([line | {"step": 1} for line in LINES])
    expected = [1, "rollout", "2 + 2", "4", "sums", 0.5]
    if name == "wandb":
        (stored,) = tmp_path.rglob("completions_*.table.json")
        assert json.loads(stored.read_text())["data"][0] == expected
        return
    (database,) = tmp_path.rglob("project.db")
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("select step, metrics from metrics order by id").fetchall()
    assert (rows[0][0], json.loads(rows[0][1])) == (1, {"loss": 0.5})
    table = json.loads(rows[1][1])["completions"]["_value"]
    assert (rows[1][0], list(table[0].values())) == (1, expected)


def test_disabled_trackers_are_not_imported(tmp_path: Path) -> None:
    before = {"wandb", "trackio"} & sys.modules.keys()
    assert trackers_of(config_of(tmp_path)) == []
    assert {"wandb", "trackio"} & sys.modules.keys() == before
    assert not (tmp_path / "run").exists()
