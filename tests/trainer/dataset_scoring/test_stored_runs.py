"""Runs on stored scores, ``mopd score`` killed at random moments, its check and its exports."""

import shutil
import signal
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_client.request_parts import LIMITS
from mopd_client.score_store import Shard, load_shard
from mopd_trainer.cli.main import main
from tests.trainer.dataset_scoring.fake_teacher import shards
from tests.trainer.forked_runs import Ended, run_mopd
from tests.trainer.runs import run_values, write_lines
from tests.trainer.whole_runs import assert_same_weights, journal, run_here

pytestmark = pytest.mark.slow

STEPS = 3
ROWS = 40
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    teachers: list[object] = ["math", "code", {"math": 1, "code": 3}]
    lines: list[object] = [
        {"prompt": f"{at} + 4 =", "completion": f"{at + 4}", "teacher": teachers[at % 3]}
        for at in range(ROWS)
    ]
    return write_lines(tmp_path / "data.jsonl", [*lines, *lines[:5]])


@pytest.fixture
def scored(data: Path, addresses: dict[str, str]) -> Callable[..., list[str]]:
    """Return the arguments of ``mopd score``."""

    def arguments(output: Path, *options: str) -> list[str]:
        teachers = [f"--teacher={name}={url}" for name, url in addresses.items()]
        return ["score", str(data), *teachers, f"--output={output}", "--top-k=8", *options]

    return arguments


@pytest.mark.parametrize(
    ("losses", "student"),
    [(["ctkd", "gold"], False), (["prefix_kl", "alm"], True), (["auto", "uld"], True)],
)
def test_training_on_stored_scores_is_training_on_live_ones_bit_for_bit(
    tmp_path: Path,
    data: Path,
    scored: Callable[..., list[str]],
    models: dict[str, Path],
    addresses: dict[str, str],
    losses: list[str],
    student: bool,
) -> None:
    output = tmp_path / "scores"
    main(scored(output, *([f"--student={models['student']}"] if student else [])))
    values = run_values(tmp_path, max_steps=STEPS)
    values["data"] = {"prompts": str(data), "source": "answers"}
    values["student"]["model"] = str(models["student"])
    values["logging"] = {"tensorboard": False, "record": True}
    values["teachers"] = {
        name: {"url": url, "top_k": 8, "loss": loss}
        for (name, url), loss in zip(addresses.items(), losses, strict=True)
    }
    live, _ = run_here(values)
    for teacher in values["teachers"].values():
        teacher |= {"scores": str(output), "url": UNREACHABLE}
    stored, printed = run_here(values, output_dir=str(tmp_path / "stored"))
    assert f"{output}, stored scores" in printed.replace("\n", " ")
    assert_same_weights(stored, live)
    lines = [journal(tmp_path / name) for name in ("run", "stored")]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
    recorded = [shards(tmp_path / name / "recordings") for name in ("run", "stored")]
    assert recorded[0] == recorded[1]


def small_blocks() -> None:
    """Four rows a shard."""
    LIMITS["sequences"] = 4


def test_a_job_killed_at_random_moments_writes_the_same_shards(
    tmp_path: Path, scored: Callable[..., list[str]]
) -> None:
    def run(output: Path, **how: Any) -> Ended:
        output.parent.mkdir(exist_ok=True)
        return run_mopd(scored(output), folder=output, prepare=small_blocks, **how)

    whole, output = (tmp_path / name / "scores" for name in ("whole", "killed"))
    ended = run(whole)
    assert ended.status == 0, ended.output
    assert len(shards(whole)) > 10
    random = np.random.default_rng(53)
    kills = 0
    while kills < 5:  # what is left to do, and thus to kill, becomes less and less
        killed = run(output, kill_before=int(random.integers(10, ended.touches // 3)))
        if killed.status == 0:
            shutil.rmtree(output)
            continue
        assert killed.status == -signal.SIGKILL, killed.output
        kills += 1
    resumed = run(output)
    assert resumed.status == 0, resumed.output
    assert shards(output) == shards(whole)


def test_the_check_agrees_until_a_score_is_changed(
    tmp_path: Path, scored: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scores"
    main(scored(output))
    capsys.readouterr()
    main(scored(output, "--check=100"))
    assert capsys.readouterr().out.count(", 0 differences") == 2
    change_a_score(output)
    with pytest.raises(SystemExit) as ended:
        main(scored(output, "--check=100"))
    assert ended.value.code == 1
    assert capsys.readouterr().out.count("row ") == 1


def change_a_score(output: Path) -> None:
    """Add one nat to the likeliest entry of a stored row."""
    path = next((output / "scores").rglob("*.safetensors"))
    shard = load_shard(path)
    score = shard.scores[0]
    logprobs = score.topk.logprobs.copy()
    logprobs[0, 0] += 1.0
    changed = replace(score, topk=replace(score.topk, logprobs=logprobs))
    new = Shard.of(shard.manifest_id, shard.ids, [changed, *shard.scores[1:]])
    new.save(output / "scores")
    with sqlite3.connect(output / "index.sqlite") as index:
        old = path.relative_to(output / "scores").as_posix()
        index.execute("UPDATE shards SET name = ? WHERE name = ?", (new.name, old))
    path.unlink()


@pytest.mark.parametrize("form", ["axolotl", "trl"])
def test_an_export_is_rejected_for_another_vocabulary(
    tmp_path: Path,
    data: Path,
    scored: Callable[..., list[str]],
    models: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    form: str,
) -> None:
    output = tmp_path / "scores"
    main(scored(output))
    arguments = ["score", str(data), f"--output={output}", f"--export={form}"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, f"--student={models['student']}"])
    assert ended.value.code == 2
    assert str(models["student"]) in capsys.readouterr().err
    assert not (output / f"{form}.jsonl").exists()
