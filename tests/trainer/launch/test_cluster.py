"""Whole runs on a Ray cluster that is started for them, on CPU cores."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd_trainer.config.resources import device_counts, placed_teachers
from mopd_trainer.config.run import RunConfig
from tests.trainer.launch.test_torchrun import untimed
from tests.trainer.runs import prompt_lines, run_values, write_lines, write_run
from tests.trainer.whole_runs import journal, run_here, weights

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

MOPD = Path(sys.executable).parent / "mopd"


@pytest.fixture
def values(tmp_path: Path, models: dict[str, Path]) -> dict[str, Any]:
    """Two ranks, a worker that writes for them, and two teachers on one core that the run starts
    itself."""
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(5))
    values = run_values(tmp_path, max_steps=2)
    values["student"] |= {"model": str(models["student"]), "sharding": "fsdp"}
    values["student"]["learning_rate"] = 1e-4
    values["resources"] = {"device": "cpu", "student": 2, "rollout_workers": 1}
    values["teachers"] = {
        name: {"placement": "ray", "serve": {"model": str(models[name])}, "top_k": 8}
        for name in ("math", "code")
    }
    values["teachers"]["code"]["serve"]["shares_with"] = "math"
    return values


def started(path: Path) -> subprocess.Popen[str]:
    """``mopd train``, whose processes can be found by the path in their environment."""
    return subprocess.Popen(
        [MOPD, "train", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MOPD_TEST_RUN": str(path)},
    )


def processes(path: Path, name: str) -> list[int]:
    """Return the PIDs of a run whose command line has the name, oldest first."""
    actual: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            value = f"MOPD_TEST_RUN={path}\0".encode() in (folder / "environ").read_bytes()
            if value and name.encode() in (folder / "cmdline").read_bytes():
                actual.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return sorted(actual)


def test_a_run_on_ray_trains_what_one_process_trains(
    tmp_path: Path, values: dict[str, Any], addresses: dict[str, str]
) -> None:
    run = started(write_run(tmp_path, values))
    output, refused = run.communicate(timeout=800)
    assert run.returncode == 0, refused
    assert output.count("saved the model to ") == 1
    del values["resources"]
    values["student"]["sharding"] = "none"
    values["teachers"] = {n: {"url": address, "top_k": 8} for n, address in addresses.items()}
    single, _ = run_here(values, output_dir=str(tmp_path / "alone"))
    for value, other in zip(journal(tmp_path / "run"), journal(tmp_path / "alone"), strict=True):
        assert "rollout/worker_restarts" not in value
        assert untimed(value) == pytest.approx(untimed(other), rel=1e-5)
    finished = weights(tmp_path / "run" / "final")
    for name, weight in weights(single).items():
        torch.testing.assert_close(finished[name], weight, rtol=1e-5, atol=1e-5)


def test_teachers_that_share_devices_are_counted_once(values: dict[str, Any]) -> None:
    values["teachers"]["code"]["serve"]["devices"] = 2
    config = RunConfig.model_validate(values)
    assert config.resources is not None
    assert placed_teachers(config.teachers) == {"math": ["math", "code"]}
    assert device_counts(config.resources, config.teachers) == [1, 1, 2, 1]


def test_a_rank_that_crashes_on_ray_ends_the_run_with_an_error(
    tmp_path: Path, values: dict[str, Any], addresses: dict[str, str]
) -> None:
    values["max_steps"] = 10_000
    del values["resources"]["rollout_workers"]
    values["teachers"] = {n: {"url": address, "top_k": 8} for n, address in addresses.items()}
    path = write_run(tmp_path, values)
    run = started(path)
    until(lambda: (tmp_path / "run" / "journal.jsonl").exists(), run)
    os.kill(processes(path, "ray::StudentRank")[-1], signal.SIGKILL)
    _, refused = run.communicate(timeout=800)
    assert run.returncode == 2
    assert refused.count("mopd: ") == 1
    assert "student rank" in refused
    assert "crashed" in refused
    until(lambda: not processes(path, "ray::StudentRank"), None)


def test_a_teacher_service_that_crashes_is_restarted_with_its_command() -> None:
    from mopd_trainer.launch.services import TeacherServices

    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    services = TeacherServices({"math": waits}, {"math": ""})
    try:
        assert services.start().keys() == {"math"}
        until(lambda: services.starts() == {"math": 1} and bool(services.process_ids()), None)
        first = services.process_ids()["math"]
        command = command_of(first)
        os.kill(first, signal.SIGKILL)
        until(lambda: services.starts() == {"math": 2}, None)
        second = services.process_ids()["math"]
        assert second != first
        assert command_of(second) == command
    finally:
        services.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def command_of(process_id: int) -> bytes:
    """Return the command line of a process, which is empty for an instant after its start."""
    command = Path(f"/proc/{process_id}/cmdline")
    until(lambda: bool(command.read_bytes()), None)
    return command.read_bytes()


def until(condition: Callable[[], bool], run: subprocess.Popen[str] | None) -> None:
    """Wait for the condition to become true, for ten minutes at most."""
    waiting = threading.Event()
    for _ in range(6000):
        if condition():
            return
        assert run is None or run.poll() is None
        waiting.wait(0.1)
    raise AssertionError("it never became true")
