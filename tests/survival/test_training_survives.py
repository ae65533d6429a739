"""A teacher is killed during a run: no sample is trained on twice, and none is skipped."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mopd_trainer.config.run import RunConfig
from mopd_trainer.loop import train
from tests import processes
from tests.ports import free_port
from tests.processes import Program
from tests.survival.running_teacher import (
    PATIENCE_SECONDS,
    command,
    environment,
    running_teacher,
)
from tests.trainer.runs import prompt_lines, run_values, write_lines

pytestmark = pytest.mark.slow

STEPS, PROMPTS_A_STEP = 6, 4
STAND_IN = "tests.survival.unlucky_teacher"


def run(folder: Path, student: Path, urls: list[str]) -> list[dict[str, Any]]:
    """Trains once through as many prompts as there are; the journal."""
    write_lines(folder / "prompts.jsonl", prompt_lines(STEPS * PROMPTS_A_STEP, ["math"]))
    values = run_values(folder, max_steps=STEPS, logging={"completions": 99, "tensorboard": False})
    values["student"]["model"] = str(student)
    teacher = {"url": urls, "top_k": 8, "deadline_seconds": PATIENCE_SECONDS}
    # Retries of spot checks are not counted.
    values["teachers"] = {"math": {**teacher, "verify": 0}}
    values["rollout"]["prompts_per_step"] = PROMPTS_A_STEP
    asyncio.run(train(RunConfig.model_validate(values), Console(file=StringIO())))
    return [json.loads(line) for line in (folder / "run" / "journal.jsonl").open()]


def completions(folder: Path) -> list[str]:
    """The completions trained on, in order."""
    return (folder / "run" / "completions.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def undisturbed(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """The same run with a teacher that lives."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with running_teacher(model_folder, folder / "log") as teacher:
        return folder, run(folder, model_folder, [teacher.url])


def assert_same_run(
    folder: Path, journal: list[dict[str, Any]], undisturbed: tuple[Path, list[dict[str, Any]]]
) -> None:
    """Each step once, with the same samples, trained on and dropped, and the same losses."""
    other_folder, other = undisturbed
    assert [line["step"] for line in journal] == list(range(1, STEPS + 1))
    for line, expected in zip(journal, other, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        counted = {name for name in expected if name.startswith(("dropped/", "tokens/"))}
        assert counted == {name for name in line if name.startswith(("dropped/", "tokens/"))}
        for name in ("rollout/samples", *counted):
            assert line[name] == expected[name], name
    assert completions(folder) == completions(other_folder)
    trained = sum(line["rollout/samples"] for line in journal)
    assert trained == len(completions(folder)) > STEPS


def test_a_run_continues_with_the_other_replica(
    model_folder: Path, tmp_path: Path, undisturbed: tuple[Path, list[dict[str, Any]]]
) -> None:
    killed = tmp_path / "killed"
    with (
        running_teacher(model_folder, tmp_path / "first") as first,
        running_teacher(
            model_folder, tmp_path / "second", program=STAND_IN, KILLED_ONCE=str(killed)
        ) as second,
    ):
        journal = run(tmp_path, model_folder, [second.url, first.url])
        assert killed.exists()
        assert second.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
        assert first.process.poll() is None
    assert_same_run(tmp_path, journal, undisturbed)
    assert sum(line.get("teacher/math/retries", 0) for line in journal) >= 1


@contextmanager
def supervised(model: Path, port: int, folder: Path, **variables: str) -> Iterator[list[int]]:
    """A teacher that is started again whenever it ends, until the block does; its exit statuses."""
    statuses: list[int] = []
    over = threading.Event()
    running: list[Program] = []

    def start_again_and_again() -> None:
        while not over.is_set():
            process = processes.start(
                STAND_IN,
                *command(model, port),
                stdout=Path(os.devnull),
                stderr=folder / f"life-{len(statuses)}",
                environment=environment(**variables),
            )
            running[:] = [process]
            statuses.append(process.wait())

    supervisor = threading.Thread(target=start_again_and_again)
    supervisor.start()
    try:
        yield statuses
    finally:
        over.set()
        running[0].terminate()
        supervisor.join()


def test_a_run_waits_for_its_only_teacher_to_be_restarted(
    model_folder: Path, tmp_path: Path, undisturbed: tuple[Path, list[dict[str, Any]]]
) -> None:
    port, killed = free_port(), tmp_path / "killed"
    with supervised(model_folder, port, tmp_path, KILLED_ONCE=str(killed)) as statuses:
        journal = run(tmp_path, model_folder, [f"http://127.0.0.1:{port}"])
        assert statuses == [-signal.SIGKILL]
    assert statuses == [-signal.SIGKILL, 0]
    assert_same_run(tmp_path, journal, undisturbed)
    assert sum(line.get("teacher/math/retries", 0) for line in journal) >= 1
