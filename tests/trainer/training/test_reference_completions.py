"""One optimizer step on reference answers, with and without rollouts."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from mopd_losses.core.student_rows import DenseRows
from mopd_protocol.errors import DataError
from mopd_trainer.config.run import StudentConfig
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.packing import micro_batch, pack
from mopd_trainer.metrics.step_metrics import LossMeasurements, Metrics
from mopd_trainer.student.student import Student
from mopd_trainer.training.learner import Learner
from tests.reference.mixture import cross_entropy, token_costs
from tests.trainer.scored_examples import aligned_pair, example, losses_for
from tests.trainer.students import CPU, ids_of, model_of, rollout, tokenizer

TEACHER_WEIGHTS = {"math": 1.0, "code": 2.5}
SHARES = [0.0, 0.3, 1.0]


def written(
    text: str, prompt: int, teachers: Mapping[str, float], *, seed: int, is_reference: bool
) -> TrainingExample:
    built = rollout(
        "digit",
        ids_of("digit", text, "<|end|>"),
        prompt_ids=range(5, 5 + prompt),
        teachers=teachers,
    )
    return example(replace(built, sampled_logprobs=None) if is_reference else built, seed=seed)


def references() -> list[TrainingExample]:
    """Return reference answers scored by one teacher, the other, and both."""
    return [
        written("12 + 30 = 42", 4, {"math": 1.0}, seed=0, is_reference=True),
        written("def add(a, b)", 2, {"code": 1.0}, seed=10, is_reference=True),
        written("的 🙂", 9, {"math": 1.0, "code": 3.0}, seed=20, is_reference=True),
    ]


def rollouts() -> list[TrainingExample]:
    return [
        written("12 + 31 = 7", 4, {"math": 1.0, "code": 1.0}, seed=30, is_reference=False),
        written("7", 1, {"code": 1.0}, seed=40, is_reference=False),
    ]


def unscored(chosen: list[TrainingExample]) -> list[TrainingExample]:
    return [TrainingExample(item.rollout, ()) for item in chosen]


def double_student() -> Student:
    return Student(model_of("qwen").double(), tokenizer("digit"), CPU)


def step(
    chosen: list[TrainingExample],
    weight: float,
    *,
    budget: int = 60,
    student: Student | None = None,
) -> tuple[Metrics, dict[str, LossMeasurements], list[Tensor]]:
    """Return the metrics of a step, and its gradient."""
    student = student or double_student()
    learner = Learner(
        student,
        StudentConfig(model="tiny", distill_loss_weight=weight, max_grad_norm=1e9),
        losses=losses_for(student, {"code": "reverse_kl"}),
        teacher_weights=TEACHER_WEIGHTS,
        max_steps=10,
        seed=0,
    )
    tokens = sum(len(item.rollout.completion) for item in chosen)
    batches = pack(chosen, tokens_per_micro_batch=budget, packed=student.packs)
    metrics, measured = learner.update(batches, tokens=tokens, step=0)
    return metrics, measured, gradient(student)


def gradient(student: Student) -> list[Tensor]:
    actual = [parameter.grad for parameter in student.model.parameters()]
    return [torch.zeros(()) if item is None else item.clone() for item in actual]


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for value, right in zip(actual, expected, strict=True):
        # Norms and rotations are single precision inside even a double model.
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-8)


def slow_step(chosen: list[TrainingExample], weight: float) -> tuple[float, list[Tensor]]:
    """The loss and its gradient from the formula: see ``tests.reference.mixture``."""
    student = double_student()
    student.model.train()
    losses = losses_for(student, {"code": "reverse_kl"})
    real_ids = torch.tensor(student.table.real_ids(student.identity.logit_width))
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for item in chosen:
        prompt = item.rollout.prompt_token_ids.tolist()
        ids = item.rollout.completion.token_ids.tolist()
        contexts = [torch.tensor([[*prompt, *ids[:row]]]) for row in range(len(ids))]
        rows = torch.stack([student.model(context).logits[0, -1] for context in contexts])
        distilled = None
        for aligned_score in item.scores:
            loss = losses[aligned_score.teacher]
            targets = loss.targets([aligned_pair(item, aligned_score)], [0])
            output = loss(DenseRows(rows, real_ids), targets)
            share = aligned_score.weight * TEACHER_WEIGHTS[aligned_score.teacher] * output.per_token
            distilled = share if distilled is None else distilled + share
        is_reference = item.rollout.sampled_logprobs is None
        real = torch.nonzero(real_ids).flatten().tolist()
        labelled = cross_entropy(student.model, prompt, ids, real) if is_reference else None
        total = total + token_costs(labelled, distilled, weight).sum()
        tokens += len(ids)
    (total / tokens).backward()
    return float(total.detach()) / tokens, gradient(student)


@pytest.mark.parametrize("weight", SHARES)
def test_loss_and_gradient_are_those_of_the_formula(weight: float) -> None:
    chosen = [*references(), *rollouts(), *unscored(references()[:1])]
    expected_loss, expected = slow_step(chosen, weight)
    metrics, _, actual = step(chosen, weight)
    assert metrics["objective"] == pytest.approx(expected_loss, rel=1e-6)
    assert_close(actual, expected)


def test_the_gradient_of_a_mixture_is_the_mixture_of_gradients() -> None:
    _, _, supervised = step(unscored(references()), 0.0)
    _, _, distilled = step(references(), 1.0)
    assert max(float((a - b).abs().max()) for a, b in zip(supervised, distilled, strict=True)) > 0.1
    for weight in SHARES:
        _, _, mixed = step(references(), weight)
        expected = [
            (1 - weight) * sft + weight * kd for sft, kd in zip(supervised, distilled, strict=True)
        ]
        assert_close(mixed, expected)


def test_sampled_completions_have_no_cross_entropy() -> None:
    expected, _, gradients = step(rollouts(), 1.0)
    metrics, _, actual = step(rollouts(), 0.2)
    assert metrics == expected
    assert "sft/loss_per_token" not in metrics
    assert all(torch.equal(a, b) for a, b in zip(actual, gradients, strict=True))


def test_plain_sft_is_the_loss_that_transformers_computes_from_labels() -> None:
    own = tokenizer("digit")
    torch.manual_seed(0)
    # A head without padding rows, over which transformers would spread probability too.
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(own), **sizes, **heads)).double()
    chosen = unscored(references())
    batch = micro_batch(chosen)
    labels = torch.full_like(batch.input_ids, -100)
    for row, item in enumerate(chosen):
        first = len(item.rollout.prompt_token_ids)
        labels[row, first : item.length] = batch.input_ids[row, first : item.length]
    right = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels)
    right.loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    tokens = int((labels != -100).sum())
    assert tokens == batch.slots
    metrics, _, actual = step(chosen, 0.0, student=Student(model, own, CPU))
    # transformers divides by the number of labels, this trainer by the step's tokens.
    assert metrics["loss"] * tokens == pytest.approx(float(right.loss.detach()) * tokens, rel=1e-6)
    assert_close(actual, expected)


@pytest.mark.parametrize("budget", [1, 30, 45])
def test_the_micro_batch_budget_changes_nothing(budget: int) -> None:
    chosen = [*references(), *rollouts()]
    expected_metrics, _, expected = step(chosen, 0.4, budget=10_000)
    metrics, measured, actual = step(chosen, 0.4, budget=budget)
    for key in ("loss", "sft/loss_per_token"):
        assert metrics[key] == pytest.approx(expected_metrics[key], rel=1e-9)
    for value, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-6, atol=1e-10)
    assert set(measured) == {"math", "code"}


def test_cross_entropy_is_measured_unweighted_per_reference_token() -> None:
    baseline, _, _ = step(unscored(references()), 0.0)
    assert baseline["sft/loss_per_token"] == pytest.approx(baseline["loss"], rel=1e-6)
    for weight in SHARES:
        mixed, measured, _ = step([*references(), *rollouts()], weight)
        assert mixed["sft/loss_per_token"] == pytest.approx(baseline["loss"], rel=1e-6)
        _, distilled_only, _ = step([*references(), *rollouts()], 1.0)
        assert measured["math"].nats == pytest.approx(distilled_only["math"].nats, rel=1e-9)


def test_a_reference_needs_no_score_and_a_rollout_does() -> None:
    assert unscored(references())[0].scores == ()
    with pytest.raises(DataError, match="prompt 0: the rollout has no score"):
        unscored(rollouts())


def test_labels_are_the_tokens_of_references_and_ignored_elsewhere() -> None:
    chosen = [*references()[:1], *rollouts()[1:]]
    batch = micro_batch(chosen)
    reference, own = (item.rollout.completion.token_ids.tolist() for item in chosen)
    assert batch.labels.tolist() == [*reference, *[-100] * len(own)]
    assert batch.has_labels
    assert not micro_batch(rollouts()).has_labels
