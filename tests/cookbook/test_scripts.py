"""The two scripts of the cookbook, run in this process against a real teacher service."""

import importlib.util
import math
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mopd_protocol.samples import Prompt, Rollout
from tests.cookbook.recipes import COOKBOOK
from tests.trainer.whole_runs import weights


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, COOKBOOK / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _losses_of_the_loop(
    script: ModuleType, stand_ins: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> list[tuple[float, str]]:
    """Nats a token and the sampled text of each step."""
    teacher = f"math={stand_ins['math']}"
    script.main([stand_ins["student"], teacher, "--steps", "8", "--learning-rate", "0.01"])
    lines = re.findall(r": (\S+) nats a token; sampled (.*)", capsys.readouterr().out)
    return [(float(nats), written) for nats, written in lines]


def test_the_loop_by_hand_learns_from_sampled_completions(
    stand_ins: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = _losses_of_the_loop(_script("loop_by_hand"), stand_ins, capsys)
    assert len({written for _, written in steps}) == 8
    # Most samples of an untrained student are not valid text and have no loss.
    assert all(math.isfinite(nats) for nats, _ in steps)
    assert any(nats > 0 for nats, _ in steps)


def test_the_loop_by_hand_brings_the_student_nearer(
    stand_ins: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train on a fixed completion, so that losses are comparable between steps."""
    script = _script("loop_by_hand")
    honest = script.sample

    def writes_this(model: Any, student: Any, prompt: Prompt, longest: int) -> Rollout:
        completion_ids = student.tokenizer(
            "42, the quick brown fox", add_special_tokens=False
        ).input_ids
        rollout: Rollout = honest(model, student, prompt, longest)
        changes = {"sampled_logprobs": None, "finish_reason": "length"}
        return replace(rollout, completion=student.table.sequence(completion_ids), **changes)

    monkeypatch.setattr(script, "sample", writes_this)
    losses = [nats for nats, _ in _losses_of_the_loop(script, stand_ins, capsys)]
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
