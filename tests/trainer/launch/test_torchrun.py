"""Whole runs on two student ranks, as ``torchrun`` starts them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd_trainer.metrics.table import is_reproduced
from tests import tiny_models
from tests.ports import free_port
from tests.trainer.runs import prompt_lines, run_values, write_lines, write_run
from tests.trainer.students import model_of, tokenizer
from tests.trainer.whole_runs import journal, run_here, weights

pytestmark = pytest.mark.slow

TORCHRUN = Path(sys.executable).parent / "torchrun"


@pytest.fixture
def values(tmp_path: Path, models: dict[str, Path], addresses: dict[str, str]) -> dict[str, Any]:
    """A run of three steps with two teachers."""
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(5))
    values = run_values(tmp_path, max_steps=3, save_steps=2)
    values["student"] |= {"model": str(models["student"]), "learning_rate": 1e-4}
    values["teachers"] = {n: {"url": address, "top_k": 8} for n, address in addresses.items()}
    return values


def on_two_ranks(path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """``mopd train`` under ``torchrun``."""
    ranks = ["--nproc-per-node=2", f"--master-port={free_port()}"]
    return subprocess.run(
        [TORCHRUN, *ranks, "-m", "mopd", "train", path, *overrides],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_torchrun_trains_what_one_process_trains(tmp_path: Path, values: dict[str, Any]) -> None:
    long = [{**line, "prompt": "x9" * 150} for line in prompt_lines(4)]  # a step of no samples
    write_lines(tmp_path / "prompts.jsonl", [*prompt_lines(4), *long, *prompt_lines(4)])
    values["data"]["shuffle"] = False
    single, _ = run_here(values, output_dir=str(tmp_path / "alone"))
    path = write_run(tmp_path, values)
    ended = on_two_ranks(path, "student.sharding=fsdp")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("saved the model to ") == 1
    assert ended.stdout.count("step 3/3  loss ") == 1
    actual, expected = journal(tmp_path / "run"), journal(tmp_path / "alone")
    assert [line.get("update/skipped_empty", 0) for line in actual] == [0, 1, 0]
    assert [line["step"] for line in actual] == [1, 2, 3]
    for left, other in zip(actual, expected, strict=True):
        assert left.keys() == other.keys()
        assert untimed(left) == pytest.approx(untimed(other), rel=1e-5)
    finished = weights(tmp_path / "run" / "final")
    for name, weight in weights(single).items():
        torch.testing.assert_close(finished[name], weight, rtol=1e-5, atol=1e-5)
    assert not list((tmp_path / "run").rglob("*.part"))


def untimed(line: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that are reproduced."""
    return {key: value for key, value in line.items() if value is not None and is_reproduced(key)}


def test_an_error_of_every_rank_is_reported_once(tmp_path: Path, values: dict[str, Any]) -> None:
    ended = on_two_ranks(write_run(tmp_path, values))
    assert ended.returncode != 0
    assert ended.stderr.count("mopd: ") == 1
    assert "student.sharding" in ended.stderr


def test_two_ranks_learn_from_a_local_teacher(
    tmp_path: Path, values: dict[str, Any], models: dict[str, Path]
) -> None:
    """Each has a copy, and the output head of a teacher that returns full rows."""
    values["teachers"] = {
        "math": {"placement": "local", "model": str(models["math"]), "top_k": 8},
        "code": {"placement": "local", "model": str(tmp_path / "code")},
    }
    tiny_models.save(model_of("qwen", 5, sharpness=4.0), tokenizer("digit"), tmp_path / "code")
    values["teachers"]["code"] |= {"support": "full", "loss": {"type": "topk_kl"}}
    values["rollout"]["scoring"] = "after_rollout"
    values["max_steps"] = 2
    single, _ = run_here(values, output_dir=str(tmp_path / "alone"))
    ended = on_two_ranks(write_run(tmp_path, values), "student.sharding=fsdp")
    assert ended.returncode == 0, ended.stderr
    for left, other in zip(journal(tmp_path / "run"), journal(tmp_path / "alone"), strict=True):
        assert untimed(left) == pytest.approx(untimed(other), rel=1e-5)
    finished = weights(tmp_path / "run" / "final")
    for name, weight in weights(single).items():
        torch.testing.assert_close(finished[name], weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_ranks_learn_from_what_was_written_while_they_trained(
    tmp_path: Path, values: dict[str, Any], sharding: str
) -> None:
    """Replaying the record on one rank ends with the same weights."""
    values |= {"max_steps": 4, "logging": {"tensorboard": False, "record": True}}
    values["rollout"] |= {"max_staleness": 1, "generation_batch_size": 2, "prompts_per_step": 10}
    ended = on_two_ranks(write_run(tmp_path, values), f"student.sharding={sharding}")
    assert ended.returncode == 0, ended.stderr
    actual = journal(tmp_path / "run")
    assert [line["step"] for line in actual] == [1, 2, 3, 4]
    assert [line["staleness/max"] for line in actual] == [0, 1, 1, 1]
    again = {"output_dir": str(tmp_path / "again"), "logging": {"tensorboard": False}}
    single, _ = run_here(values, replay=str(tmp_path / "run"), **again)
    for left, other in zip(actual, journal(tmp_path / "again"), strict=True):
        for key in ("loss", "grad_norm", "staleness/mean"):
            assert left[key] == pytest.approx(other[key], rel=1e-5), key
    finished = weights(tmp_path / "run" / "final")
    for name, weight in weights(single).items():
        torch.testing.assert_close(finished[name], weight, rtol=1e-5, atol=1e-5)
