"""LoRA students: what is trained, what stays, and that the step is the full student's."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd_protocol.errors import ConfigError, MissingPackageError
from mopd_trainer.config.run import LoraConfig, RolloutConfig
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.student.student import Student
from tests.trainer.lora_students import LORA, base_in, config_in, learner_for, moved, step
from tests.trainer.students import model_of

#: No clipping.
FREELY = {"max_grad_norm": 1e9}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_in(tmp_path_factory.mktemp("base"))


def own_weights(student: Student) -> dict[str, Tensor]:
    """Return the base model's weights, under their names without adapters."""
    trained = student.trained()
    return {
        name.replace(".base_layer.", "."): parameter.detach().clone()
        for name, parameter in student.model.named_parameters()
        if name not in trained
    }


def test_only_adapters_are_trained_and_the_models_own_weights_stay_bit_for_bit(base: Path) -> None:
    config = config_in(base, weight_decay=0.1)
    student = Student.load(config)
    expected = dict(model_of("qwen", sharpness=4.0).named_parameters())
    first = {name: parameter.detach().clone() for name, parameter in student.trained().items()}
    learner = learner_for(student, config)
    losses = [step(learner, number)["loss"] for number in range(3)]
    assert losses == sorted(losses, reverse=True)
    actual = own_weights(student)
    assert actual.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(actual[name], parameter), name
    for name, parameter in student.model.named_parameters():
        assert (parameter.grad is not None) == (name in first), name
    for name, parameter in student.trained().items():
        assert not torch.equal(parameter, first[name]), name
    [group] = learner.optimizer.param_groups
    assert len(group["params"]) == len(first)
    moments = learner.optimizer.state_dict()["state"]
    assert [list(moments[at]["exp_avg"].shape) for at in sorted(moments)] == [
        list(parameter.shape) for parameter in first.values()
    ]


def test_every_linear_layer_has_adapters_but_the_head_and_the_embedding(base: Path) -> None:
    student = Student.load(config_in(base))
    adapted = {name.partition(".lora_")[0] for name in student.trained()}
    linear = {
        name
        for name, module in model_of("qwen").named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    assert adapted == linear
    assert len(linear) == 14


def test_the_first_step_sees_the_full_students_loss(base: Path) -> None:
    output: list[float] = []
    for lora in (LORA, None):
        config = config_in(base, lora)
        output.append(step(learner_for(Student.load(config), config), 0)["loss"])
    assert output[0] == output[1]


def test_the_gradient_of_the_two_matrices_follows_from_the_full_students(base: Path) -> None:
    """The gradients of ``W + s B A`` are ``s B^T dW`` by A and ``s dW A^T`` by B."""
    config = config_in(base, **FREELY)
    student = moved(Student.load(config))
    student.model.double()
    full_config = config_in(base, None, **FREELY)
    full = Student.load(full_config)
    full.model.double()
    scale = LORA["alpha"] / LORA["rank"]
    weights = dict(full.model.named_parameters())
    pairs: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in student.trained().items():
        pairs.setdefault(name.partition(".lora_")[0], []).append(parameter)
    before = {name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in pairs.items()}
    with torch.no_grad():
        for name, (a, b) in before.items():
            weights[f"{name}.weight"] += scale * b @ a
    left, right = (
        step(learner_for(example, settings), 0)
        for example, settings in ((student, config), (full, full_config))
    )
    assert left["loss"] == pytest.approx(right["loss"], rel=1e-6)
    for name, (a, b) in before.items():
        whole = weights[f"{name}.weight"].grad
        assert whole is not None
        for parameter, expected in zip(
            pairs[name], (scale * b.T @ whole, scale * whole @ a.T), strict=True
        ):
            assert parameter.grad is not None
            # Norms and rotations are single precision inside even a double model.
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_micro_batch_budget_changes_nothing(base: Path, checkpointing: bool) -> None:
    """With every layer run twice too, which requires gradients through a frozen embedding."""
    actual: list[tuple[float, list[Tensor]]] = []
    for budget, twice in ((10_000, False), (30, checkpointing)):
        config = config_in(base, gradient_checkpointing=twice, **FREELY)
        student = moved(Student.load(config))
        student.model.double()
        loss = step(learner_for(student, config), 0, budget)["loss"]
        gradients = [parameter.grad for parameter in student.trained().values()]
        assert all(gradient is not None for gradient in gradients)
        actual.append((loss, [gradient for gradient in gradients if gradient is not None]))
    assert actual[0][0] == pytest.approx(actual[1][0], rel=1e-9)
    for left, right in zip(actual[0][1], actual[1][1], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-8)


def test_in_half_precision_adapters_and_moments_are_float32(base: Path) -> None:
    output: list[float] = []
    for dtype in ("float32", "bfloat16"):
        config = config_in(base, dtype=dtype, learning_rate=1e-6)
        student = moved(Student.load(config))
        before = {name: parameter.detach().clone() for name, parameter in student.trained().items()}
        learner = learner_for(student, config)
        output.append(step(learner, 0)["loss"])
        assert {value.dtype for value in own_weights(student).values()} == {getattr(torch, dtype)}
        for name, parameter in student.trained().items():
            assert parameter.dtype == torch.float32
            # Adam's first step is its learning rate, which a bfloat16 weight would not see.
            largest = float((parameter.detach() - before[name]).abs().max())
            assert largest == pytest.approx(1e-6, rel=0.1)
        for moments in learner.optimizer.state_dict()["state"].values():
            assert {value.dtype for value in moments.values()} == {torch.float32}
    assert output[0] != output[1]
    assert output[0] == pytest.approx(output[1], rel=2**-6)


def test_a_seed_decides_how_adapters_begin_and_nothing_else_is_drawn(base: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again = (Student.load(config_in(base)).trained() for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    other = Student.load(config_in(base, {**LORA, "seed": 1})).trained()
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        assert torch.equal(parameter, other[name]) == ("lora_B" in name)
        assert ("lora_B" in name) == (not parameter.any())


def test_dropout_is_only_active_in_training_and_a_function_of_the_step(base: Path) -> None:
    output: dict[float, list[Any]] = {}
    for dropout in (0.0, 0.5):
        output[dropout] = []
        for _ in range(2):
            config = config_in(base, {**LORA, "dropout": dropout})
            student = moved(Student.load(config))
            [written] = student.generate([[5, 6, 7]], RolloutConfig(max_new_tokens=6), seed=0)
            torch.rand(1)  # an unrelated draw
            loss = step(learner_for(student, config), 0)["loss"]
            output[dropout].append((written.token_ids, written.logprobs, loss))
        assert output[dropout][0] == output[dropout][1]
    without, with_dropout = output[0.0][0], output[0.5][0]
    assert without[:2] == with_dropout[:2]
    assert without[2] != with_dropout[2]


@pytest.mark.anyio
async def test_a_copy_has_its_own_adapters_and_shares_frozen_weights(base: Path) -> None:
    student = moved(Student.load(config_in(base)))
    trained = student.trained()
    sampler = Sampler(student, RolloutConfig(max_new_tokens=4, max_staleness=1), seed=0)
    copied = dict(sampler._student.model.named_parameters())
    for name, parameter in student.model.named_parameters():
        shared = parameter.data_ptr() == copied[name].data_ptr()
        assert shared == (name not in trained), name
    before = {name: copied[name].clone() for name in trained}
    moved(student, seed=2)
    assert all(torch.equal(copied[name], before[name]) for name in trained)
    await sampler.push_weights(1)
    assert all(torch.equal(copied[name], parameter) for name, parameter in trained.items())


def test_the_identity_without_weights_counts_adapters_too(base: Path) -> None:
    config = config_in(base)
    read, student = StudentIdentity.read(config), Student.load(config)
    counted = sum(parameter.numel() for parameter in student.trained().values())
    assert (read.parameters, read.trained) == (student.identity.parameters, counted)
    full = StudentIdentity.read(config_in(base, None))
    assert full.parameters == full.trained == read.parameters - counted


def test_the_layers_that_are_named_are_adapted(base: Path) -> None:
    names = ["q_proj", "layers.1.mlp.down_proj"]
    student = Student.load(config_in(base, {**LORA, "target_modules": names}))
    assert {name.partition(".lora_")[0] for name in student.trained()} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    }


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["q_proj", "q_prj"], r"'q_prj' \(expected some of down_proj, gate_proj"),
        (["embed_tokens"], "'embed_tokens'"),
        (["q_proj", "lm_head"], "the head 'lm_head'"),
    ],
)
def test_unsupported_target_modules_are_rejected(
    base: Path, names: list[str], problem: str
) -> None:
    config = config_in(base, {**LORA, "target_modules": names})
    for read in (Student.load, StudentIdentity.read):
        with pytest.raises(ConfigError, match=problem) as caught:
            read(config)
        assert caught.value.key == "student.lora.target_modules"
        assert "\n" not in str(caught.value)


def test_without_peft_there_is_one_sentence_and_full_students_do_not_miss_it(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # importing it would fail
    for read in (Student.load, StudentIdentity.read):
        read(config_in(base, None))
        with pytest.raises(MissingPackageError) as caught:
            read(config_in(base))
        assert caught.value.key == "peft"


def test_settings_that_train_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="Value error, target_modules: "):
        LoraConfig(target_modules=())
