"""Replays of a recording, without teachers: same loss, same weights."""

import asyncio
import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mopd_protocol.errors import CheckpointError, ConfigError, MopdError
from mopd_trainer.config.run import RunConfig
from mopd_trainer.data.prompts import read_prompts
from mopd_trainer.launch.preflight import check_run
from mopd_trainer.run_folder.recordings.recording import Recording, step_path
from tests.trainer.runs import prompt_lines, run_values, write_lines
from tests.trainer.students import table
from tests.trainer.whole_runs import assert_same_weights, journal, run_cut_off, run_here

pytestmark = pytest.mark.slow

STEPS = 3
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture
def values(tmp_path: Path, models: dict[str, Path], addresses: dict[str, str]) -> dict[str, Any]:
    """Half of the samples from reference answers; two teachers score both halves."""
    lines: list[object] = [
        {"prompt": f"{at} + 4 =", "solution": f"{at + 4}", "teacher": teacher}
        for at, teacher in enumerate(["math", "code", {"math": 1, "code": 3}, "code", "math"])
    ]
    write_lines(tmp_path / "prompts.jsonl", lines)
    values = run_values(tmp_path, max_steps=STEPS, save_steps=1)
    values["data"] |= {"answer_key": "solution", "on_policy_fraction": 0.5}
    values["student"] |= {"model": str(models["student"]), "distill_loss_weight": 0.5}
    values["rollout"]["samples_per_prompt"] = 3
    values["teachers"] = {
        name: {"url": url, "top_k": 8, "loss": {"type": "ctkd"}} for name, url in addresses.items()
    }
    values["logging"] = {"tensorboard": False, "record": True}
    return values


def replayed(values: dict[str, Any], folder: Path, **changes: Any) -> dict[str, Any]:
    """The same run on the recording, with unreachable teachers."""
    teachers = {
        name: {**teacher, "url": UNREACHABLE} for name, teacher in values["teachers"].items()
    }
    return {
        **values,
        "output_dir": str(folder / "replay"),
        "replay": values["output_dir"],
        "teachers": teachers,
        "logging": {"tensorboard": False},
        **changes,
    }


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in journal(folder)]


def test_a_replay_with_the_same_loss_ends_with_the_same_weights(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    live, _ = run_here(values)
    again, output = run_here(replayed(values, tmp_path))
    assert f"replay: completions and scores recorded by {tmp_path / 'run'}" in output
    assert_same_weights(again, live)
    assert losses(tmp_path / "replay") == losses(tmp_path / "run")
    for line, other in zip(journal(tmp_path / "replay"), journal(tmp_path / "run"), strict=True):
        for key in ("answers/tokens", "rollout/tokens", "teacher/code/alignment_ratio"):
            assert line[key] == other[key], key
    shown = [(tmp_path / name / "completions.jsonl").read_bytes() for name in ("run", "replay")]
    assert shown[0] == shown[1]
    asyncio.run(check_run(RunConfig.model_validate(replayed(values, tmp_path / "x")), Console()))


def test_a_step_without_samples_is_skipped_in_the_replay_too(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    long = [{**line, "prompt": "x9" * 150} for line in prompt_lines(4)]
    write_lines(tmp_path / "prompts.jsonl", [*prompt_lines(4), *long, *prompt_lines(4)])
    values["data"] = {"prompts": values["data"]["prompts"], "shuffle": False}
    values["student"]["distill_loss_weight"] = 1.0
    live, output = run_here(values)
    lines = journal(tmp_path / "run")
    assert [line.get("update/skipped_empty", 0) for line in lines] == [0, 1, 0]
    assert [line["loss"] is None for line in lines] == [False, True, False]
    assert [line.get("dropped/prompt_too_long", 0) for line in lines] == [0, 12, 0]
    assert "step 2/3  step skipped" in output
    again, _ = run_here(replayed(values, tmp_path))
    assert_same_weights(again, live)
    assert losses(tmp_path / "replay") == losses(tmp_path / "run")


def test_a_replay_may_have_another_loss_and_more_steps(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    live, _ = run_here(values)
    other = replayed(values, tmp_path, max_steps=2 * STEPS)
    other["teachers"]["code"]["loss"] = {"type": "gold"}
    again, _ = run_here(other)
    replayed_losses = losses(tmp_path / "replay")
    assert len(replayed_losses) == 2 * STEPS
    assert replayed_losses[0] != losses(tmp_path / "run")[0]
    assert replayed_losses[STEPS] < replayed_losses[0]  # the same completions, a second time
    with pytest.raises(AssertionError):
        assert_same_weights(again, live)


def test_a_resumed_run_has_the_recording_of_an_uninterrupted_run(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    run_here(values, output_dir=str(tmp_path / "whole"))
    run_cut_off(values, in_step=3)
    run_here(values, resume_from_checkpoint=str(tmp_path / "run" / "checkpoints" / "step-00000001"))
    resumed, uninterrupted = (files(tmp_path / name / "recordings") for name in ("run", "whole"))
    assert [name for name in resumed if "scores" not in name] == [
        "recording.json",
        *(f"step-0000000{step}.safetensors" for step in (1, 2, 3)),
    ]
    assert len(resumed) > 4
    assert resumed == uninterrupted


def files(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_a_recording_is_no_larger_than_documented(tmp_path: Path, values: dict[str, Any]) -> None:
    run_here(values)
    prompts = read_prompts(RunConfig.model_validate(values).data, ["math", "code"])
    recording = Recording(tmp_path / "run")
    assert recording.steps == STEPS
    facts = (recording.folder / "recording.json").stat().st_size
    bound = 0
    for step in range(1, STEPS + 1):
        bound += 8
        for sample in recording.read(step, prompts, table("digit")):
            rollout = sample.rollout
            bound += 8 * (len(rollout.prompt_token_ids) + len(rollout.completion)) + 2_000
            for score in (recorded.score for recorded in sample.scores):
                topk, completion = score.topk, score.completion
                bound += len(topk) * (16 + 8 * topk.k) + len(completion.text)
    assert sum(map(len, files(recording.folder).values())) - facts <= bound


def test_a_recordings_scores_are_a_score_cache(tmp_path: Path, values: dict[str, Any]) -> None:
    run_here(values)
    cache = {"score_cache": str(tmp_path / "run" / "recordings" / "scores")}
    run_here({**values, **cache, "output_dir": str(tmp_path / "again")})
    lines = journal(tmp_path / "again")
    for name in values["teachers"]:
        hits = sum(line.get(f"teacher/{name}/cache_hits", 0) for line in lines)
        misses = sum(line.get(f"teacher/{name}/cache_misses", 0) for line in lines)
        # Samples that were dropped are not recorded.
        assert hits > misses <= sum(line.get("dropped/total", 0) for line in lines)


def another_student(values: dict[str, Any], folder: Path, models: dict[str, Path]) -> None:
    values["student"]["model"] = str(models["math"])


def other_data(values: dict[str, Any], folder: Path, models: dict[str, Path]) -> None:
    path = write_lines(
        folder / "other.jsonl", [{"prompt": "?", "solution": "!", "teacher": "math"}]
    )
    values["data"]["prompts"] = str(path)


def another_top_k(values: dict[str, Any], folder: Path, models: dict[str, Path]) -> None:
    values["teachers"]["code"]["top_k"] = 7


def no_recording(values: dict[str, Any], folder: Path, models: dict[str, Path]) -> None:
    values["replay"] = str(folder)


def damaged_step(values: dict[str, Any], folder: Path, models: dict[str, Path]) -> None:
    path = step_path(Path(values["replay"]) / "recordings", 1)
    path.write_bytes(path.read_bytes()[:-1])


def test_a_replay_of_another_run_raises(
    tmp_path: Path, values: dict[str, Any], models: dict[str, Path]
) -> None:
    """One recording for all mismatches."""
    run_here(values, max_steps=1)
    Change = Callable[[dict[str, Any], Path, dict[str, Path]], None]
    mismatches: list[tuple[Change, type[MopdError], str]] = [
        (another_student, ConfigError, "student.model"),
        (other_data, ConfigError, "data.prompts"),
        (another_top_k, ConfigError, "teachers.code.top_k"),
        (no_recording, CheckpointError, "recording.json"),
        (damaged_step, CheckpointError, "step-00000001.safetensors"),
    ]
    for change, kind, key in mismatches:
        chosen = json.loads(json.dumps(replayed(values, tmp_path, max_steps=1)))
        change(chosen, tmp_path, models)
        with pytest.raises(kind) as caught:
            asyncio.run(_train(chosen))
        assert caught.value.key is not None
        assert caught.value.key.endswith(key)


async def _train(values: dict[str, Any]) -> None:
    from mopd_trainer.loop import train

    await train(RunConfig.model_validate(values), Console(file=StringIO()))
