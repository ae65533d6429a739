"""Evaluation within runs: what is journaled, and that training does not notice it."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.errors import ConfigError, DataError
from mopd_trainer.api import evaluate
from mopd_trainer.config.loading import parse_run
from mopd_trainer.config.run import RunConfig
from mopd_trainer.evaluation.results import gaps_closed
from mopd_trainer.evaluation.schedule import RunEvaluation
from mopd_trainer.evaluation.sets import read_sets
from mopd_trainer.interruption import Interrupted
from tests.trainer.runs import prompt_lines, run_values, write_lines
from tests.trainer.whole_runs import assert_same_weights, journal, run_here

STEPS = 5
SETS = {
    "sums": {"answer_key": "answer", "samples": 2},
    "text": {"answer_key": "answer", "grader": "log_likelihood"},
}


@pytest.fixture
def values(tmp_path: Path, models: dict[str, Path], addresses: dict[str, str]) -> dict[str, Any]:
    """A run that is evaluated before steps 1, 3 and 5, and after step 5."""
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(5))
    lines = [{"prompt": f"{n} + 4 =", "answer": str(n + 4), "tag": n % 2} for n in range(6)]
    path = str(write_lines(tmp_path / "held-out.jsonl", lines))
    values = run_values(tmp_path, max_steps=STEPS, save_steps=2)
    values["student"]["model"] = str(models["student"])
    values["teachers"] = {name: {"url": url, "top_k": 8} for name, url in addresses.items()}
    sets = {name: {**settings, "prompts": path} for name, settings in SETS.items()}
    values["evaluation"] = {"every": 2, "sets": sets, "teachers": ["math"]}
    return values


def evaluated(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run without times."""
    lines = [
        {k: v for k, v in line.items() if k == "step" or k.startswith("evaluation/")}
        for line in journal(folder)
    ]
    return [line for line in lines if len(line) > 1]


@pytest.mark.slow
def test_training_does_not_depend_on_its_evaluation(tmp_path: Path, values: dict[str, Any]) -> None:
    folder, output = run_here(values)
    without = str(tmp_path / "without")
    plain, _ = run_here(values, evaluation=None, output_dir=without)
    assert_same_weights(folder, plain)
    losses = {line["step"]: line["loss"] for line in journal(folder.parent) if "loss" in line}
    assert losses == {line["step"]: line["loss"] for line in journal(plain.parent)}

    lines = evaluated(folder.parent)
    assert [line["step"] for line in lines] == [0, 2, 4, 5]
    assert len(journal(folder.parent)) == STEPS + 1
    for line in lines:
        low, share, high = (
            line[f"evaluation/sums/sampled_accuracy{end}"] for end in ("_low", "", "_high")
        )
        assert 0 <= low <= share <= high < 1
        assert line["evaluation/text/bits_per_byte"] > 0
    gap = "evaluation/text/gap_closed/math"
    before, after, reference = (
        line[f"evaluation/text/{name}bits_per_byte"]
        for line, name in ((lines[0], ""), (lines[-1], ""), (lines[0], "teacher/math/"))
    )
    assert {name for name in lines[0] if "/teacher/" in name and "code" in name} == set()
    expected = (before - after) / (before - reference) if reference < before else None
    assert lines[-1][gap] == pytest.approx(expected)
    assert output.count("evaluation after step ") == 4 + 1  # the teacher's, once
    assert "time/evaluate_share" in journal(folder.parent)[-1]

    checkpoint = folder.parent / "checkpoints" / f"step-{STEPS:08}"
    address = values["teachers"]["math"]["url"]
    for model, line, prefix in (
        (folder, lines[-1], ""),
        (checkpoint, lines[-1], ""),
        ("math", lines[0], "teacher/math/"),
        (address, lines[0], "teacher/math/"),
    ):
        for name, metrics in evaluate(model, RunConfig.model_validate(values)).items():
            expected = {key: line[f"evaluation/{name}/{prefix}{key}"] for key in metrics}
            assert metrics == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("cut_at", [2, 4])
def test_an_interrupted_evaluation_is_repeated(
    tmp_path: Path, values: dict[str, Any], cut_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a signal, after which a checkpoint is saved, and by a crash, without one."""
    whole, _ = run_here(values, output_dir=str(tmp_path / "whole"))
    original = RunEvaluation.evaluate

    async def evaluate(self: RunEvaluation, steps: int) -> Any:
        if steps == cut_at:
            os.kill(os.getpid(), signal.SIGTERM) if cut_at == 2 else crash()
        return await original(self, steps)

    def crash() -> None:
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(RunEvaluation, "evaluate", evaluate)
        with pytest.raises((Interrupted, RuntimeError)):
            run_here(values)
    folder, _ = run_here(values, resume_from_checkpoint=True)
    assert evaluated(folder.parent) == evaluated(whole.parent)
    assert_same_weights(folder, whole)


@pytest.mark.slow
def test_the_checkpoint_with_the_best_evaluation_is_kept(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    metric = "evaluation/text/bits_per_byte"
    settings = {"best_checkpoint_metric": metric, "keep_checkpoints": 1, "save_steps": 1}
    worst = {**settings, "best_checkpoint_mode": "max"}
    evaluation = {**values["evaluation"], "every": 1}
    for name, changes, choose in (("best", settings, min), ("worst", worst, max)):
        folder, _ = run_here(
            values, **changes, evaluation=evaluation, output_dir=str(tmp_path / name)
        )
        scores = {line["step"]: line[metric] for line in evaluated(folder.parent)[1:]}
        steps = {choose(scores, key=lambda step: scores[step]), STEPS}
        kept = {int(each.name[-8:]) for each in (folder.parent / "checkpoints").iterdir()}
        assert kept == steps


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"teachers": ["phys"]}, "evaluation.sets.sums.teachers"),
        ({"metric": "evaluation/none/accuracy"}, "best_checkpoint_metric"),
    ],
)
def test_unknown_names_are_rejected(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    values = run_values(tmp_path, best_checkpoint_metric=changes.pop("metric", None))
    sets = {"sums": {"prompts": "x.jsonl"}}
    values["evaluation"] = {"every": 1, "sets": sets, **changes}
    with pytest.raises(ConfigError) as caught:
        parse_run(values, source="run.yaml")
    assert caught.value.key == key


def test_a_missing_reference_is_reported_before_the_run(tmp_path: Path) -> None:
    values = run_values(tmp_path)
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": "?", "answer": 1}, {"prompt": "?"}])
    sets = {"sums": {"prompts": str(path), "answer_key": "answer", "grader": "last_number"}}
    values["evaluation"] = {"every": 1, "sets": sets}
    with pytest.raises(DataError) as caught:
        read_sets(RunConfig.model_validate(values).evaluation)
    assert caught.value.key == "evaluation.sets.sums.answer_key"
    sets["sums"]["prompts"] = str(tmp_path / "none.jsonl")
    with pytest.raises(DataError):
        read_sets(RunConfig.model_validate(values).evaluation)
    sets["sums"] |= {"prompts": str(path), "limit": 1}
    (loaded,) = read_sets(RunConfig.model_validate(values).evaluation)
    assert loaded.references == (1,)


def test_the_gap_is_measured_from_before_to_the_teacher() -> None:
    before = {"accuracy": 0.2, "sampled_accuracy": 0.1, "bits_per_byte": 3.0}
    now = {"accuracy": 0.5, "sampled_accuracy": 0.1, "bits_per_byte": 2.0}
    teachers = {"math": {"accuracy": 0.8, "sampled_accuracy": 0.6, "bits_per_byte": 1.0}}
    gaps = gaps_closed(now, before, teachers | {"weak": {"accuracy": 0.2}})
    assert gaps == pytest.approx(
        {
            "gap_closed/math": 0.5,
            "sampled_gap_closed/math": 0.0,
            "gap_closed/weak": float("nan"),
        },
        nan_ok=True,
    )
