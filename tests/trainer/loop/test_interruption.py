"""Ctrl-C, SIGTERM and SIGHUP: the step is finished or abandoned, and a checkpoint is saved."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mopd_protocol.errors import ConfigError, DiskError, TeacherUnavailableError
from mopd_trainer.cli.main import main
from mopd_trainer.config.run import RunConfig
from mopd_trainer.interruption import Interruption, Stopped
from mopd_trainer.launch.preflight import check_run
from mopd_trainer.loop import train
from mopd_trainer.teachers.scoring import RolloutScorer
from mopd_trainer.training.learner import Learner
from tests.trainer.runs import run_values, write_lines, write_run
from tests.trainer.whole_runs import assert_same_weights, journal, run_here

STEPS = 4
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MOPD = Path(sys.executable).parent / "mopd"


@pytest.fixture(autouse=True)
def as_in_a_terminal() -> Iterator[None]:
    """``nohup`` has the tests begun with SIGHUP ignored, and a shell's ``&`` with SIGINT."""
    ordinary = (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL)
    before = [signal.signal(example, to) for example, to in zip(SIGNALS, ordinary, strict=True)]
    yield
    for example, to in zip(SIGNALS, before, strict=True):
        signal.signal(example, to)


@pytest.fixture
def values(tmp_path: Path, models: dict[str, Path]) -> dict[str, Any]:
    """Return a run of plain SFT, without teachers; a checkpoint at the end only."""
    lines = [{"prompt": f"{number} + 2 =", "solution": str(number + 2)} for number in range(5)]
    write_lines(tmp_path / "prompts.jsonl", lines)
    values = run_values(tmp_path, teachers={}, max_steps=STEPS, logging={"tensorboard": False})
    values["data"] |= {"source": "answers", "answer_key": "solution"}
    values["student"] |= {"model": str(models["student"]), "distill_loss_weight": 0.0}
    return values


@pytest.fixture(autouse=True)
def signals_are_delivered() -> Iterator[None]:
    """Restore default handlers, also under ``nohup`` or in the background of a script."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, before)
    signal.signal(signal.SIGINT, interrupt)


def while_learning(patched: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """The signal comes in step 2's update."""
    original = Learner.update

    def update(self: Learner, *batches: Any, **output: Any) -> Any:
        if output["step"] == 1:
            os.kill(os.getpid(), number)
        return original(self, *batches, **output)

    patched.setattr(Learner, "update", update)


def while_waiting(patched: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """The signal comes while step 3 waits for a teacher that never responds."""
    original = RolloutScorer.score

    async def score(self: RolloutScorer, rollouts: Any, **options: Any) -> Any:
        if rollouts[0].policy_version == 2:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        return await original(self, rollouts, **options)

    patched.setattr(RolloutScorer, "score", score)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_lost_teacher_loses_no_step(
    tmp_path: Path,
    values: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    grouped: bool,
) -> None:
    original = RolloutScorer.score

    async def score(self: RolloutScorer, rollouts: Any, **options: Any) -> Any:
        if rollouts[0].policy_version == 2:
            error = TeacherUnavailableError("teacher 'math' is unavailable")
            raise ExceptionGroup("lost", [error]) if grouped else error
        return await original(self, rollouts, **options)

    path = write_run(tmp_path, values)
    with monkeypatch.context() as patched:
        patched.setattr(RolloutScorer, "score", score)
        with pytest.raises(SystemExit) as ended:
            main(["train", str(path)])
    assert ended.value.code == 2
    folder = tmp_path / "run" / "checkpoints" / "step-00000002"
    output = capsys.readouterr().err
    assert output.startswith("mopd: teacher 'math' is unavailable Step 2 ")
    assert f"{folder}. Resume with resume_from_checkpoint=true.\n" in output
    final, output = run_here(values, resume_from_checkpoint=True)
    assert f"resumed after step 2 from {folder}" in output
    whole, _ = run_here(values, output_dir=str(tmp_path / "whole"))
    assert_same_weights(final, whole)


@pytest.mark.parametrize("when", [while_learning, while_waiting])
@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["INT", "TERM", "HUP"],
)
def test_an_interrupted_run_saves_its_progress_and_resumes(
    tmp_path: Path,
    values: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    when: Callable[[pytest.MonkeyPatch, signal.Signals], None],
    number: signal.Signals,
    exit_code: int,
) -> None:
    path = write_run(tmp_path, values)
    before = [signal.getsignal(example) for example in SIGNALS]
    with monkeypatch.context() as patched:
        when(patched, number)
        with pytest.raises(SystemExit) as ended:
            main(["train", str(path)])
    assert ended.value.code == exit_code
    output = capsys.readouterr().err
    folder = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert output == (
        f"mopd: {number.name} after step 2; the checkpoint is {folder}; resume with "
        "resume_from_checkpoint=true\n"
    )
    assert [signal.getsignal(example) for example in SIGNALS] == before
    assert [line["step"] for line in journal(tmp_path / "run")] == [1, 2]

    final, output = run_here(values, resume_from_checkpoint=True)
    assert f"resumed after step 2 from {folder}" in output
    whole, _ = run_here(values, output_dir=str(tmp_path / "whole"))
    assert [line["step"] for line in journal(tmp_path / "run")] == [1, 2, 3, 4]
    assert_same_weights(final, whole)


@pytest.mark.process
def test_a_run_whose_terminal_is_closed_saves_its_progress(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    """The console can no longer be written to; the run must not be lost."""
    path = write_run(tmp_path, values | {"max_steps": 10_000, "logging_steps": 1})
    terminal, left = pty.openpty()
    run = subprocess.Popen(
        ["setsid", "--ctty", "--wait", MOPD, "train", path],
        stdin=left,
        stdout=left,
        stderr=left,
    )
    os.close(left)
    lines = tmp_path / "run" / "journal.jsonl"
    try:
        while not lines.exists() or lines.read_bytes().count(b"\n") < 2:
            os.read(terminal, 4096)
        os.close(terminal)
        assert run.wait(timeout=600) == 129
    finally:
        run.kill()
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == f"step-{journal(tmp_path / 'run')[-1]['step']:08}"


@pytest.mark.anyio
async def test_a_second_hangup_does_nothing_and_one_under_nohup_neither() -> None:
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(Stopped):
            await interruption.cancel_on_signal(asyncio.sleep(1e9))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.anyio
async def test_a_second_signal_is_not_delayed() -> None:
    with Interruption() as interruption:
        handler = signal.getsignal(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped):
            await interruption.cancel_on_signal(asyncio.sleep(1e9))
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL != handler
        with pytest.raises(Stopped):  # nothing is begun any more
            await interruption.cancel_on_signal(asyncio.sleep(0))


@pytest.mark.anyio
async def test_work_that_fails_fails_as_itself() -> None:
    async def fail() -> None:
        raise RuntimeError("broken")

    with Interruption() as interruption:
        assert await interruption.cancel_on_signal(asyncio.sleep(0, result=7)) == 7
        with pytest.raises(RuntimeError, match="broken"):
            await interruption.cancel_on_signal(fail())


def test_a_small_disk_and_a_missing_device_end_a_run_before_its_first_step(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=StringIO())
    elsewhere = {**values, "student": {**values["student"], "device": "cuda:99"}}
    for command in (train, check_run):
        with pytest.raises(ConfigError) as missing:
            asyncio.run(command(RunConfig.model_validate(elsewhere), console))
        assert missing.value.key == "student.device"
    config = RunConfig.model_validate(values)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10_000))
    with pytest.raises(DiskError) as small:
        asyncio.run(train(config, console))
    assert small.value.key == str(config.output_dir)
    with pytest.raises(ConfigError) as refused:
        asyncio.run(check_run(config, console))
    assert refused.value.key == "resources"
    assert not config.output_dir.exists()
