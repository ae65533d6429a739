"""Runs with rewards: only rewards, with a teacher, as a gate; resumed, recorded and replayed."""

import json
from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.errors import ConfigError, DataError, MopdError
from mopd_trainer.config.loading import load_run
from mopd_trainer.metrics.table import is_reproduced
from tests import tiny_models
from tests.server.tiny_teachers import teacher_of
from tests.trainer.in_process import Recorded, serve_in_process
from tests.trainer.runs import prompt_lines, run_values, write_lines
from tests.trainer.students import model_of, tokenizer
from tests.trainer.whole_runs import assert_same_weights, journal, run_cut_off, run_here

FUNCTIONS = "python:tests.trainer.loop.reward_functions"
EVEN = {"grader": f"{FUNCTIONS}:even"}


@pytest.fixture
def own() -> Recorded:
    return Recorded(teacher_of(model_of("qwen", seed=1, sharpness=4), tokenizer("digit")).app)


@pytest.fixture
def values(tmp_path: Path, own: Recorded, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    serve_in_process(monkeypatch, {"own": own})
    lines = [{**line, "gold": line["prompt"][0]} for line in prompt_lines(4, ["own"])]
    write_lines(tmp_path / "prompts.jsonl", lines)
    folder = tiny_models.save(model_of("qwen"), tokenizer("digit"), tmp_path / "student")
    values = run_values(tmp_path, max_steps=3)
    values["student"] |= {"model": str(folder)}
    values["data"] |= {"ignored_keys": ["gold"]}
    values["rollout"] |= {"samples_per_prompt": 4, "prompts_per_step": 3}
    values["logging"] = {"tensorboard": False, "record": True, "completions": 2}
    values["teachers"] = {"own": {"url": "http://own", "top_k": 8}}
    values["rewards"] = {"even": EVEN, "digits": {"grader": f"{FUNCTIONS}:share", "weight": 0.5}}
    return values


def test_a_run_with_both_terms_is_recorded_and_replayed(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    live, console = run_here(values)
    lines = journal(Path(values["output_dir"]))
    assert "rewards: even 1, digits 0.5" in console
    assert "reward (even 0." in console
    for line in lines:
        assert 0 < line["reward/even"] < 1
        assert 0 < line["reinforcement/spread_share"] <= 1
        assert line["reinforcement/importance_ratio_mean"] == pytest.approx(1, abs=1e-3)
        assert line["reinforcement/clipped_share"] == 0
        assert line["compared_share"] == pytest.approx(1)
        assert line["rollout/corrected_share"] == 0
    logged = (Path(values["output_dir"]) / "completions.jsonl").read_text().splitlines()
    assert all({*json.loads(line)["rewards"]} == {"even", "digits"} for line in logged)
    assert any(json.loads(line)["advantage"] for line in logged)

    replay = {
        **values,
        "output_dir": str(tmp_path / "replay"),
        "replay": values["output_dir"],
        "logging": {"tensorboard": False},
    }
    replayed, _ = run_here(replay)
    assert_same_weights(replayed, live)
    other, _ = run_here({**replay, "output_dir": str(tmp_path / "none"), "rewards": {}})
    with pytest.raises(AssertionError):
        assert_same_weights(other, live)


def test_a_recording_without_rewards_is_graded_in_the_replay(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    plain = {**values, "rewards": {}, "output_dir": str(tmp_path / "plain")}
    plain["rollout"] = {**values["rollout"], "temperature": 1.0, "corrections": 0}
    run_here(plain)
    run_here(
        {
            **values,
            "output_dir": str(tmp_path / "replay"),
            "replay": plain["output_dir"],
            "logging": {"tensorboard": False},
        }
    )
    run_here(values)
    first, replayed = journal(Path(values["output_dir"]))[0], journal(tmp_path / "replay")[0]
    assert first["reward/even"] == replayed["reward/even"]  # of the same first samples
    assert first["objective"] == pytest.approx(replayed["objective"])


def test_a_run_with_rewards_is_resumed_bit_for_bit(tmp_path: Path, values: dict[str, Any]) -> None:
    expected, _ = run_here(values)
    cut = {**values, "output_dir": str(tmp_path / "cut"), "save_steps": 1}
    run_cut_off(cut, in_step=3)
    resumed, _ = run_here(cut, resume_from_checkpoint=True)
    assert_same_weights(resumed, expected)
    last, other = (journal(folder.parent)[-1] for folder in (expected, resumed))
    names = [name for name in last if is_reproduced(name)]
    assert "reward/even" in names
    assert [name for name in names if last[name] != other.get(name)] == []
    with pytest.raises(MopdError) as caught:
        run_here(cut, resume_from_checkpoint=True, rewards={"even": EVEN})
    assert "rewards" in str(getattr(caught.value, "key", ""))


def test_a_run_without_teachers_trains_rewards_only(
    tmp_path: Path, own: Recorded, values: dict[str, Any]
) -> None:
    settings = {**values, "teachers": {}, "data": {**values["data"], "ignored_keys": "all"}}
    trained, console = run_here(settings)
    lines = journal(Path(values["output_dir"]))
    assert all(line["loss"] is None and line["compared_share"] is None for line in lines)
    assert all(line["grad_norm"] > 0 for line in lines)
    assert not own.sequences
    assert "reward (even 0." in console
    assert "nan" not in console
    with pytest.raises(AssertionError):
        assert_same_weights(trained, tmp_path / "student")


@pytest.mark.parametrize("distill", ["failed", "passed"])
def test_a_gate_sends_only_some_completions_to_teachers(
    own: Recorded, values: dict[str, Any], distill: str
) -> None:
    values["rewards"] = {"even": {**EVEN, "distill": distill}}
    run_here(values)
    lines = journal(Path(values["output_dir"]))
    passed = sum(line["reward/even"] * 12 for line in lines)
    expected = passed if distill == "passed" else 36 - passed
    assert 0 < len(own.sequences) == round(expected) < 36
    assert all("dropped/total" not in line for line in lines)
    assert all(line["rollout/samples"] == 12 for line in lines)


def test_a_gate_without_weight_drops_the_other_completions(
    own: Recorded, values: dict[str, Any]
) -> None:
    values["rewards"] = {"even": {**EVEN, "distill": "failed", "weight": 0}}
    run_here(values)
    lines = journal(Path(values["output_dir"]))
    for line in lines:
        assert line["dropped/not_distilled"] == round(line["reward/even"] * 12)
        assert line["rollout/samples"] == 12 - line["dropped/total"]
    assert len(own.sequences) == sum(line["rollout/samples"] for line in lines)


def test_a_reward_compares_with_its_key_of_the_data(values: dict[str, Any]) -> None:
    values["data"].pop("ignored_keys")
    values["rewards"] = {"gold": {"grader": "normalized", "answer_key": "gold"}}
    run_here(values)
    values["rewards"]["gold"]["answer_key"] = "silver"
    values["data"]["ignored_keys"] = ["gold"]
    with pytest.raises(DataError) as caught:
        run_here(values)
    assert caught.value.key == "rewards.gold.answer_key"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["rollout.samples_per_prompt=1"], "rollout.samples_per_prompt"),
        (["rollout.temperature=0", "rollout.samples_per_prompt=1"], "rewards"),
        (["rollout.top_p=0.9"], "rewards"),
        (["rollout.corrections=1"], "rewards"),
        (["data.source=answers"], "rewards"),
        (["teachers={}", "rewards.even.distill=failed"], "rewards.even.distill"),
        (["rewards.even.grader=log_likelihood"], "rewards.even.grader"),
    ],
)
def test_settings_that_exclude_rewards(
    tmp_path: Path, values: dict[str, Any], changes: list[str], key: str
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(values))
    assert load_run(path).rollout.temperature == 1
    with pytest.raises(ConfigError) as caught:
        load_run(path, changes)
    assert caught.value.key == key
