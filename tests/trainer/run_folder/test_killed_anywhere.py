"""``kill -9`` at any moment: the resumed run equals an uninterrupted one."""

import json
import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mopd_trainer.metrics.table import is_reproduced
from tests.trainer.forked_runs import Ended, run_mopd
from tests.trainer.lora_students import LORA
from tests.trainer.runs import prompt_lines, run_values, write_lines, write_run
from tests.trainer.whole_runs import assert_same_weights, journal

pytestmark = pytest.mark.slow

STEPS = 4


@pytest.fixture
def values(tmp_path: Path, models: dict[str, Path], addresses: dict[str, str]) -> dict[str, Any]:
    """On-policy, two teachers, a checkpoint every second step, of which one is kept."""
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(5))
    values = run_values(tmp_path, max_steps=STEPS, save_steps=2, keep_checkpoints=1)
    values["logging"] = {"record": True}
    values["student"]["model"] = str(models["student"])
    values["teachers"] = {name: {"url": url, "top_k": 8} for name, url in addresses.items()}
    return values


def run(folder: Path, values: dict[str, Any], **how: Any) -> Ended:
    """Run ``mopd train`` in ``folder``, resuming from existing checkpoints."""
    folder.mkdir(exist_ok=True)
    settings = {**values, "output_dir": str(folder / "run"), "resume_from_checkpoint": True}
    path = write_run(folder, settings)
    return run_mopd(["train", str(path)], folder=folder / "run", **how)


def lasting(folder: Path) -> list[dict[str, Any]]:
    """Return the journal without the metrics that are not reproduced."""
    return [
        {key: value for key, value in line.items() if is_reproduced(key)}
        for line in journal(folder)
    ]


def losses_shown(folder: Path) -> list[tuple[int, float]]:
    """Return the losses in TensorBoard."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def assert_same_run(folder: Path, other: Path) -> None:
    """Check for gaps and duplicates, and that all bytes are identical."""
    assert lasting(folder) == lasting(other)
    assert [line["step"] for line in journal(folder)] == list(range(1, STEPS + 1))
    assert (folder / "completions.jsonl").read_bytes() == (other / "completions.jsonl").read_bytes()
    for recorded in filter(Path.is_file, (other / "recordings").rglob("*")):
        assert (folder / recorded.relative_to(other)).read_bytes() == recorded.read_bytes()
    assert losses_shown(folder) == losses_shown(other)
    assert_same_weights(folder / "final", other / "final")
    for path, expected in zip(sorted(folder.rglob("*")), sorted(other.rglob("*")), strict=False):
        if "tensorboard" not in path.parts:
            assert path.relative_to(folder) == expected.relative_to(other)


@pytest.mark.parametrize(("lora", "kills"), [(None, 10), (LORA, 4)], ids=["full", "lora"])
def test_a_run_killed_anywhere_ends_as_if_it_had_not_been(
    tmp_path: Path, values: dict[str, Any], lora: Any, kills: int
) -> None:
    """Killed before it touches its folder, where checkpoints are written, and at any time."""
    kills *= 5 if os.environ.get("MOPD_SURVIVAL") == "full" else 1
    values["student"]["lora"] = lora
    whole = run(tmp_path / "whole", values)
    assert whole.status == 0, whole.output
    assert whole.touches > 50
    random = np.random.default_rng(20)
    deaths = [_death(random, whole, kind) for kind in ("touch", "time") * (kills // 2)]
    for attempt in count():
        folder = tmp_path / f"attempt-{attempt}"
        while True:  # killed again and again, until it comes to its end
            ended = run(folder, values, **(deaths.pop() if deaths else {}))
            if ended.status == 0:
                break
            assert ended.status in (-signal.SIGKILL, -signal.SIGALRM), ended.output
            steps = [json.loads(line)["step"] for line in _whole_lines(folder)]
            assert steps == list(range(1, len(steps) + 1))
        assert_same_run(folder / "run", tmp_path / "whole" / "run")
        if not deaths:
            break


def _death(random: np.random.Generator, whole: Ended, kind: str) -> dict[str, Any]:
    """Before a touch of the folder, or after a time, which some runs will not need."""
    if kind == "time":
        return {"alarm_seconds": random.uniform(0.3, 3.0)}
    return {"kill_before": int(random.integers(1, whole.touches))}


def _whole_lines(folder: Path) -> list[bytes]:
    path = folder / "run" / "journal.jsonl"
    lines = path.read_bytes().splitlines(True) if path.exists() else []
    return [line for line in lines if line.endswith(b"\n")]
