"""Whole runs: two teacher services with different tokenizers, and a trainer that is killed."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from mopd_protocol.errors import TeacherMismatchError
from mopd_trainer.config.loading import load_run
from mopd_trainer.config.run import RunConfig
from mopd_trainer.launch.preflight import check_run
from mopd_trainer.loop import train
from tests.trainer.runs import prompt_lines, run_values, write_lines, write_run
from tests.trainer.students import MESSAGES
from tests.trainer.whole_runs import assert_same_weights, journal, run_cut_off, run_here, weights

pytestmark = pytest.mark.slow

MOPD = Path(sys.executable).parent / "mopd"
STEPS = 6
TEACHERS = ("math", "code")
#: ``mopd`` with the arguments that it is given, killed where step 4 would change the weights.
KILLED_IN_STEP_4 = """
import os, signal, sys
from mopd_trainer.training.learner import Learner
from mopd_trainer.cli.main import main

honest = Learner.update

def update(self, *batches, **options):
    if options["step"] + 1 == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return honest(self, *batches, **options)

Learner.update = update
main(sys.argv[1:])
"""


@pytest.fixture
def values(tmp_path: Path, models: dict[str, Path], addresses: dict[str, str]) -> dict[str, Any]:
    """A run of a few steps; one request per teacher and step, so that batches are equal."""
    lines: list[object] = [*prompt_lines(5), {"prompt": "?", "teacher": {"math": 1, "code": 3}}]
    write_lines(tmp_path / "prompts.jsonl", lines)
    values = run_values(tmp_path, max_steps=STEPS, save_steps=2)
    values["student"]["model"] = str(models["student"])
    values["teachers"] = {
        "math": {"url": addresses["math"], "top_k": 8},
        "code": {"url": addresses["code"], "top_k": 8, "loss": {"divergence": "reverse_kl"}},
    }
    values["teachers"]["code"]["loss"]["type"] = "ctkd"
    return values


@pytest.fixture
def uninterrupted(tmp_path: Path, values: dict[str, Any]) -> Path:
    """The finished student of a run that nothing happened to."""
    return run_here(values, output_dir=str(tmp_path / "uninterrupted"))[0]


def test_a_run_leaves_a_student_a_journal_and_checkpoints(
    tmp_path: Path, models: dict[str, Path], values: dict[str, Any]
) -> None:
    values["importance_weights"] = {"least": 0.1}
    folder, messages = run_here(values)
    output = tmp_path / "run"
    assert folder == output / "final"
    assert (output / "report.html").is_file()
    before, after = weights(models["student"]), weights(folder)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.apply_chat_template([MESSAGES[0].model_dump()], tokenize=False)

    lines = journal(output)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert math.isfinite(line["loss"])
        assert line["loss"] > 0
        fractions = [line[f"teacher/{name}/token_fraction"] for name in TEACHERS]
        assert math.fsum(fractions) == pytest.approx(1.0)
        assert line["tokens/trained"] > 0
    means = [line[f"teacher/{name}/importance_weight_mean"] for line in lines for name in TEACHERS]
    assert 0.1 <= min(mean for mean in means if mean is not None) < 1
    assert messages.count(f"/{STEPS}  loss ") == STEPS
    samples = [min(2, int(line["rollout/samples"])) for line in lines]
    assert (output / "completions.jsonl").read_bytes().count(b"\n") == sum(samples)
    assert [*(output / "tensorboard").glob("events.out.*")]
    actual = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert actual == ["step-00000004", "step-00000006"]
    assert load_run(output / "config.yaml") == RunConfig.model_validate(values)
    assert not list(output.rglob("*.part"))


def test_a_check_prints_the_teachers_and_creates_no_file(
    tmp_path: Path, values: dict[str, Any], addresses: dict[str, str]
) -> None:
    messages = StringIO()
    before = sorted(tmp_path.rglob("*"))
    asyncio.run(check_run(RunConfig.model_validate(values), Console(file=messages, width=200)))
    assert f"{STEPS} steps of 4 completions from 6 prompts" in messages.getvalue()
    for name, address in addresses.items():
        assert f"teacher {name}" in messages.getvalue()
        assert address in messages.getvalue()
    assert "ctkd reverse_kl on the teacher's top 8, weight 1, 3 prompts" in messages.getvalue()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_teachers_name_is_printed_verbatim(values: dict[str, Any]) -> None:
    """Console markup in a name is not interpreted."""
    prompts = Path(values["data"]["prompts"])
    lines = prompts.read_text()
    for name in ("[/b]", "[bold]"):
        prompts.write_text(lines.replace('"math"', f'"{name}"'))
        teachers = {name: values["teachers"]["math"], "code": values["teachers"]["code"]}
        messages = StringIO()
        config = RunConfig.model_validate({**values, "teachers": teachers})
        asyncio.run(check_run(config, Console(file=messages, width=200)))
        assert f"teacher {name} " in messages.getvalue()


def test_a_run_survives_a_closed_stdout(tmp_path: Path, values: dict[str, Any]) -> None:
    path = write_run(tmp_path, values)
    with subprocess.Popen(
        [MOPD, "train", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stderr is not None
        assert trainer.stdout.readline()
        trainer.stdout.close()  # as `| head -1` does
        assert trainer.stderr.read() == ""
        assert trainer.wait() == 0
    assert (Path(values["output_dir"]) / "final").is_dir()


def test_a_killed_trainer_resumes_as_if_uninterrupted(
    tmp_path: Path, values: dict[str, Any], uninterrupted: Path
) -> None:
    path = write_run(tmp_path, values)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_IN_STEP_4, "train", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as trainer:
        messages, _ = trainer.communicate()
    assert trainer.returncode == -signal.SIGKILL, messages
    assert f"step 3/{STEPS}  loss " in messages
    with pytest.raises(ProcessLookupError):
        os.killpg(trainer.pid, 0)  # nothing that it started is left
    output = tmp_path / "run"
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000002"]
    assert [line["step"] for line in journal(output)] == [1, 2, 3]
    assert not (output / "final").exists()

    folder, messages = run_here(values, resume_from_checkpoint=True)
    assert "resumed after step 2" in messages
    assert [line["step"] for line in journal(output)] == list(range(1, STEPS + 1))
    assert_same_weights(folder, uninterrupted)
    expected = [line["loss"] for line in journal(uninterrupted.parent)]
    assert [line["loss"] for line in journal(output)] == expected


def test_a_run_that_fails_between_checkpoints_repeats_no_step(
    tmp_path: Path, values: dict[str, Any], uninterrupted: Path
) -> None:
    run_cut_off(values, in_step=4)
    output = tmp_path / "run"
    assert [line["step"] for line in journal(output)] == [1, 2, 3]
    folder, messages = run_here(values, resume_from_checkpoint=True)
    assert "resumed after step 2" in messages
    assert [line["step"] for line in journal(output)] == list(range(1, STEPS + 1))
    assert_same_weights(folder, uninterrupted)


def test_a_finished_run_resumes_only_with_the_same_teachers(
    tmp_path: Path, values: dict[str, Any], addresses: dict[str, str]
) -> None:
    run_here(values, max_steps=2)
    swapped = json.loads(json.dumps(values))
    swapped["teachers"]["math"]["url"] = addresses["code"]
    again = {"max_steps": 3, "resume_from_checkpoint": True, "accept_changed_settings": True}
    config = RunConfig.model_validate({**swapped, **again})
    for command in (train, check_run):
        with pytest.raises(TeacherMismatchError, match=r"teacher 'math' at .*: manifest differs"):
            asyncio.run(command(config, Console(file=StringIO())))
    assert [line["step"] for line in journal(tmp_path / "run")] == [1, 2]
    run_here(swapped, **again, accept_changed_teachers=True)
    assert [line["step"] for line in journal(tmp_path / "run")] == [1, 2, 3]
