"""Half precision in products, with float32 weights, sums and moments."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mopd_trainer.config.run import StudentConfig
from mopd_trainer.data.packing import pack
from mopd_trainer.student.student import Student
from mopd_trainer.training.learner import Learner
from tests.trainer.scored_examples import losses_for
from tests.trainer.students import CPU, model_of, tokenizer
from tests.trainer.training.test_reference_completions import gradient, references, rollouts

#: bfloat16 keeps 8 bits: one rounding is 2^-9 of a number, and a layer makes dozens.
BFLOAT16 = 2**-8


def step(compute: torch.dtype, **config: Any) -> tuple[float, list[Tensor], Learner, Student]:
    student = Student(model_of("qwen"), tokenizer("digit"), CPU, compute_dtype=compute)
    learner = Learner(
        student,
        StudentConfig(model="tiny", distill_loss_weight=0.5, max_grad_norm=1e9, **config),
        losses=losses_for(student, {"code": "reverse_kl"}),
        teacher_weights={"math": 1.0, "code": 1.0},
        max_steps=10,
        seed=0,
    )
    chosen = [*references(), *rollouts()]
    tokens = sum(len(example.rollout.completion) for example in chosen)
    metrics, _ = learner.update(pack(chosen, tokens_per_micro_batch=60), tokens=tokens, step=0)
    return metrics["loss"], gradient(student), learner, student


def test_loss_and_gradient_are_those_of_float32_to_half_a_precision() -> None:
    expected_loss, expected, *_ = step(torch.float32)
    loss, actual, *_ = step(torch.bfloat16)
    assert loss != expected_loss  # or nothing was in half precision
    assert loss == pytest.approx(expected_loss, rel=BFLOAT16)
    for left, other in zip(actual, expected, strict=True):
        assert left.dtype == torch.float32
        assert float((left - other).norm()) <= 16 * BFLOAT16 * float(other.norm())


def test_weights_and_moments_stay_float32_and_keep_small_steps() -> None:
    before = [parameter.detach().clone() for parameter in model_of("qwen").parameters()]
    *_, learner, student = step(torch.bfloat16, learning_rate=1e-6, weight_decay=0.0)
    moved = 0.0
    for parameter, old in zip(student.model.parameters(), before, strict=True):
        assert parameter.dtype == torch.float32
        moved = max(moved, float((parameter.detach() - old).abs().max()))
    # Adam's first step is its learning rate: a bfloat16 weight of 0.02 would not have moved.
    assert moved == pytest.approx(1e-6, rel=0.1)
    for state in learner.optimizer.state_dict()["state"].values():
        assert {value.dtype for value in state.values()} == {torch.float32}


@pytest.mark.parametrize("setting", ["float32", "bfloat16"])
def test_the_setting_decides_in_what_products_are_made(tmp_path: Any, setting: str) -> None:
    from tests import tiny_models

    tiny_models.save(model_of("qwen"), tokenizer("digit"), tmp_path)
    config = StudentConfig.model_validate(
        {"model": str(tmp_path), "device": "cpu", "dtype": setting}
    )
    student = Student.load(config)
    built: list[torch.dtype] = []
    layer: Any = student.model.base_model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, inputs, output: built.append(output.dtype))
    student.generate([[5, 6, 7]], _two_tokens(), seed=0)
    assert set(built) == {getattr(torch, setting)}
    assert {parameter.dtype for parameter in student.model.parameters()} == {torch.float32}


def _two_tokens() -> Any:
    from mopd_trainer.config.run import RolloutConfig

    return RolloutConfig(max_new_tokens=2)
