"""The two scripts of the cookbook, run in this process against a real teacher service."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.cookbook.recipes import COOKBOOK
from tests.trainer.whole_runs import weights


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, COOKBOOK / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loop_by_hand_brings_the_student_nearer(
    stand_ins: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _script("loop_by_hand").main(
        [
            stand_ins["student"],
            f"math={stand_ins['math']}",
            "--steps",
            "8",
            "--learning-rate",
            "0.01",
        ]
    )
    losses = [float(nats) for nats in re.findall(r": (\S+) nats", capsys.readouterr().out)]
    assert len(losses) == 8
    assert 0 < losses[-1] < 0.9 * losses[0]


def test_the_loop_by_hand_is_short() -> None:
    assert len((COOKBOOK / "loop_by_hand.py").read_text().splitlines()) <= 150


def test_a_transformers_trainer_learns_from_a_teacher(
    stand_ins: dict[str, str], tmp_path: Path
) -> None:
    trainer = _script("hf_trainer").main(
        [
            stand_ins["student"],
            f"math={stand_ins['math']}",
            "--max-steps",
            "3",
            "--output-dir",
            str(tmp_path),
        ]
    )
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert all(loss > 0 for loss in losses)
    before, after = weights(Path(stand_ins["student"])), trainer.student.model.state_dict()
    assert any((before[name] != after[name]).any() for name in before)
