"""Gradient checkpointing: every layer twice, the same gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mopd_protocol.errors import ConfigError
from mopd_trainer.config.run import RolloutConfig, StudentConfig
from mopd_trainer.student.student import Student
from tests import tiny_models
from tests.trainer.students import FAMILIES, model_of, tokenizer
from tests.trainer.training.test_reference_completions import references, rollouts, step


def student_in(folder: Path, family: str, *, checkpointing: bool) -> Student:
    tiny_models.save(model_of(family), tokenizer(FAMILIES[family][1]), folder)
    config = {"model": str(folder), "device": "cpu", "gradient_checkpointing": checkpointing}
    student = Student.load(StudentConfig.model_validate(config))
    student.model.double()
    return student


def calls_of_a_layer(student: Student) -> list[bool]:
    """Return a list that records whether gradients are enabled at each call of the first layer."""
    calls: list[bool] = []
    attentions = ("0.self_attn", "0.attention")
    layer: Any = next(m for name, m in student.model.named_modules() if name.endswith(attentions))
    layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    return calls


def test_the_gradient_is_the_same_and_every_layer_runs_twice(tmp_path: Path) -> None:
    chosen = [*references(), *rollouts()]
    output: dict[bool, Any] = {}
    for checkpointing in (False, True):
        student = student_in(tmp_path, "qwen", checkpointing=checkpointing)
        calls = calls_of_a_layer(student)
        metrics, _, actual = step(chosen, 0.4, student=student)
        output[checkpointing] = (metrics["loss"], actual, len(calls))
    assert output[True][0] == pytest.approx(output[False][0], rel=1e-9)
    for left, other in zip(output[True][1], output[False][1], strict=True):
        torch.testing.assert_close(left, other, rtol=1e-6, atol=1e-10)
    assert output[True][2] == 2 * output[False][2]


def test_writing_runs_no_layer_twice(tmp_path: Path) -> None:
    written: list[Any] = []
    for checkpointing in (False, True):
        student = student_in(tmp_path, "qwen", checkpointing=checkpointing)
        calls = calls_of_a_layer(student)
        [sampled] = student.generate([[5, 6, 7]], RolloutConfig(max_new_tokens=4), seed=0)
        written.append((sampled.token_ids, len(calls)))
    assert written[0] == written[1]


def test_an_unsupported_model_raises_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3ForCausalLM

    monkeypatch.setattr(Qwen3ForCausalLM, "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError) as caught:
        student_in(tmp_path, "qwen", checkpointing=True)
    assert caught.value.key == "student.gradient_checkpointing"
