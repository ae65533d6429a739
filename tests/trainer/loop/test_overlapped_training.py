"""Whole runs that write the next steps while they train: how old things are, and what that does."""

import gc
import math
from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.training.learner import Learner
from tests import tiny_models
from tests.broker import Broker
from tests.trainer.lora_students import LORA
from tests.trainer.runs import prompt_lines, run_values, write_lines
from tests.trainer.students import model_of, tokenizer
from tests.trainer.whole_runs import journal, run_cut_off, run_here

pytestmark = pytest.mark.slow

STEPS = 5
#: Adapters whose first steps are as large as those of all weights.
FAR = {**LORA, "alpha": 128}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with the student's tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    return tiny_models.save(model_of("qwen", seed=1, sharpness=8), tokenizer("digit"), folder)


@pytest.fixture
def address(broker: Broker, model_folder: Path) -> str:
    """The address of its service."""
    return broker.serve({"math": model_folder})["math"]


@pytest.fixture
def values(tmp_path: Path, models: dict[str, Path], address: str) -> dict[str, Any]:
    """A run of policy gradient with steps that are large enough to move the student."""
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(12, ["math"]))
    teacher = {"url": address, "top_k": 8, "loss": {"type": "policy_gradient"}}
    values = run_values(tmp_path, max_steps=STEPS, teachers={"math": teacher})
    values["rollout"]["prompts_per_step"] = 12  # some of what a fresh student babbles is dropped
    values["student"] |= {"model": str(models["student"]), "learning_rate": 1e-2}
    return values


def lines(values: dict[str, Any], **rollout: Any) -> list[dict[str, Any]]:
    """The journal of a run with these changes."""
    folder, _ = run_here(values, rollout={**values["rollout"], **rollout})
    return journal(folder.parent)


def test_on_policy_the_importance_ratio_is_one(values: dict[str, Any]) -> None:
    for line in lines(values):
        assert line["staleness/mean"] == line["staleness/max"] == 0
        assert line["teacher/math/importance_ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert line["time/push"] >= 0
        assert line["time/sample"] + line["time/train"] <= line["time/step"] + 1e-6


@pytest.mark.parametrize(("max_staleness", "lora"), [(1, None), (2, None), (1, FAR)])
def test_what_is_written_ahead_is_weighted_by_how_likely_it_has_become(
    values: dict[str, Any], max_staleness: int, lora: Any
) -> None:
    values["student"]["lora"] = lora
    actual = lines(values, max_staleness=max_staleness)
    assert [line["step"] for line in actual] == list(range(1, STEPS + 1))
    ages = [line["staleness/max"] for line in actual]
    assert ages[:2] == [0, 1]  # the second step is written while the first is scored
    assert set(ages[2:]) <= set(range(1, max_staleness + 1))
    assert not any("dropped/stale" in line for line in actual)
    for line in actual:
        ratio = line["teacher/math/importance_ratio_mean"]
        assert math.isfinite(ratio)
        if line["staleness/mean"] == 0:
            assert ratio == pytest.approx(1.0, abs=1e-4)
    assert any(abs(line["teacher/math/importance_ratio_mean"] - 1) > 1e-3 for line in actual)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_examples_and_scores_of_earlier_steps_are_released(
    values: dict[str, Any], max_staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, alive, sizes = Learner.update, [], []
    kinds = (TrainingExample, TopKLogprobs)
    others = [each for each in gc.get_objects() if type(each) in kinds]  # of other tests

    def counted(self: Learner, *batches: Any, **options: Any) -> Any:
        gc.collect()
        known = {id(each) for each in others}
        kept = [e for e in gc.get_objects() if type(e) in kinds and id(e) not in known]
        alive.append(sum(isinstance(each, TrainingExample) for each in kept))
        sizes.append(sum(each.ids.nbytes for each in kept if isinstance(each, TopKLogprobs)))
        return update(self, *batches, **options)

    monkeypatch.setattr(Learner, "update", counted)
    lines(values, max_staleness=max_staleness, max_new_tokens=4)
    step, ahead = values["rollout"]["prompts_per_step"], max_staleness + 1
    assert max(alive) <= step * ahead
    # Scores of the completions, of their corrections, and of likely tokens of the student.
    assert max(sizes) <= 3 * step * ahead * 5 * 8 * 4


def test_stale_samples_are_dropped_and_the_run_continues(values: dict[str, Any]) -> None:
    actual = lines(values, max_staleness=1, on_stale="drop")
    assert [line["step"] for line in actual] == list(range(1, STEPS + 1))
    for line in actual:
        assert line["staleness/max"] <= 1
        assert line.get("dropped/stale", 0) <= line.get("dropped/total", 0)
        assert line["rollout/samples"] > 0


def test_a_resumed_run_begins_with_fresh_completions(
    values: dict[str, Any],
) -> None:
    ahead = {"rollout": {**values["rollout"], "max_staleness": 1}, "save_steps": 3}
    run_cut_off(values, in_step=4, **ahead)
    folder, _ = run_here(values, resume_from_checkpoint=True, **ahead)
    actual = journal(folder.parent)
    assert [line["step"] for line in actual] == list(range(1, STEPS + 1))
    assert actual[3]["staleness/max"] == 0
    assert actual[3]["teacher/math/importance_ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert actual[4]["staleness/max"] == 1
