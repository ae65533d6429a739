"""One optimizer step: its loss and gradient, which do not depend on the packing."""

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from mopd_losses.core.loss import AlignedPair, Loss, LossOutput, Targets
from mopd_losses.core.student_rows import DenseRows, StudentLogprobs
from mopd_losses.topk.topk_targets import TopKTargets
from mopd_protocol.errors import TrainingError
from mopd_trainer.config.run import StudentConfig
from mopd_trainer.config.settings import UNWEIGHTED, ImportanceConfig, LossAverage
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.importance import ImportanceWeights
from mopd_trainer.data.packing import MicroBatch, micro_batch, pack, split
from mopd_trainer.metrics.step_metrics import LossMeasurements, Metrics
from mopd_trainer.student.student import Student
from mopd_trainer.training.learner import Learner
from mopd_trainer.training.update_guard import UpdateGuard
from tests.trainer.scored_examples import TOKENIZERS, example, losses_for
from tests.trainer.students import CPU, ids_of, model_of, rollout, student_of, table, tokenizer

TEACHER_WEIGHTS = {"math": 1.0, "code": 2.5}
UNIMPORTANT = ImportanceWeights(
    UNWEIGHTED, 1, {name: table(tokenizer) for name, tokenizer in TOKENIZERS.items()}
)
#: No clipping.
FREELY = {"max_grad_norm": 1e9}


def examples() -> list[TrainingExample]:
    """Return examples of unequal lengths, for one teacher, the other, and both."""
    written = [
        ("12 + 30 = 42", 4, {"math": 1.0}),
        ("def add(a, b):\n    return a + b", 2, {"code": 1.0}),
        ("的 🙂", 9, {"math": 1.0, "code": 3.0}),
        ("7", 1, {"code": 1.0}),
    ]
    return [
        example(
            rollout(
                "digit",
                ids_of("digit", text, "<|end|>"),
                prompt_ids=range(5, 5 + prompt),
                teachers=teachers,
                index=index,
            ),
            seed=10 * index,
        )
        for index, (text, prompt, teachers) in enumerate(written)
    ]


def sampled_with_certainty(item: TrainingExample) -> TrainingExample:
    """Return an example whose student was sure of every token; its teachers are less so."""
    nats = np.zeros(len(item.rollout.completion))
    return replace(item, rollout=replace(item.rollout, sampled_logprobs=nats))


def learner_of(student: Student, **config: Any) -> Learner:
    settings = {"model": "tiny", "learning_rate": 1e-3, **config}
    return Learner(
        student,
        StudentConfig.model_validate(settings),
        losses=losses_for(student, {"code": "reverse_kl"}),
        teacher_weights=TEACHER_WEIGHTS,
        max_steps=10,
        seed=0,
    )


def double_student() -> Student:
    return Student(model_of("qwen").double(), tokenizer("digit"), CPU)


def updated(
    student: Student, batches: list[MicroBatch], tokens: int, **config: Any
) -> tuple[Metrics, list[Tensor]]:
    """Return the metrics of a step, and its gradient."""
    metrics, _ = learner_of(student, **FREELY, **config).update(batches, tokens=tokens, step=0)
    return metrics, gradients(student)


def gradients(student: Student) -> list[Tensor]:
    actual: list[Tensor] = []
    for parameter in student.model.parameters():
        assert parameter.grad is not None
        actual.append(parameter.grad.clone())
    return actual


def packed(
    chosen: list[TrainingExample],
    budget: int,
    average: LossAverage = "tokens",
    importance: ImportanceWeights | None = None,
) -> tuple[list[MicroBatch], int]:
    batches = list(
        pack(chosen, tokens_per_micro_batch=budget, average=average, importance=importance)
    )
    return batches, sum(batch.slots for batch in batches)


def update(learner: Learner, step: int) -> tuple[Metrics, dict[str, LossMeasurements]]:
    """One step on all examples."""
    batches, tokens = packed(examples(), 60)
    return learner.update(batches, tokens=tokens, step=step)


def slow_loss(
    student: Student,
    chosen: list[TrainingExample],
    average: LossAverage = "tokens",
    importance: ImportanceWeights = UNIMPORTANT,
) -> tuple[Tensor, float]:
    """Average of the losses over the step, one context at a time.

    And the average of the tokens that begin a span, which are those that these losses compare.
    """
    losses = losses_for(student, {"code": "reverse_kl"})
    real_ids = torch.tensor(student.table.real_ids(student.identity.logit_width))
    total, compared = torch.zeros((), dtype=torch.float64), 0.0
    lengths = [len(item.rollout.completion) for item in chosen]
    by_teacher = dict.fromkeys(losses, 0.0)
    for item, length in zip(chosen, lengths, strict=True):
        for score in item.scores:
            by_teacher[score.teacher] += score.weight * length
    for item in chosen:
        prompt = item.rollout.prompt_token_ids.tolist()
        ids = item.rollout.completion.token_ids.tolist()
        rows = [
            student.model(torch.tensor([[*prompt, *ids[:row]]])).logits[0, -1]
            for row in range(len(ids))
        ]
        for aligned_score in item.scores:
            part = micro_batch([item]).teachers[aligned_score.teacher]
            targets = losses[aligned_score.teacher].targets(part.comparisons, (0,))
            student_rows = DenseRows(torch.stack(rows), real_ids)
            output = losses[aligned_score.teacher](student_rows, targets)
            divisor = {
                "tokens": sum(lengths),
                "samples": len(chosen) * len(ids),
                "teachers": len(by_teacher) * by_teacher[aligned_score.teacher],
            }[average]
            weight = aligned_score.weight / divisor
            important = torch.from_numpy(
                importance.of(item.rollout, aligned_score).astype("float64")
            )
            factor = weight * TEACHER_WEIGHTS[aligned_score.teacher]
            total = total + factor * (output.per_token * important).sum()
            compared += weight * len(aligned_score.alignment)
    return total, compared


@pytest.mark.parametrize("average", get_args(LossAverage))
def test_loss_and_gradient_are_the_average_over_the_step(average: LossAverage) -> None:
    reference = double_student()
    reference.model.train()
    expected, compared = slow_loss(reference, examples(), average)
    expected.backward()
    student = double_student()
    metrics, actual = updated(student, *packed(examples(), 60, average))
    assert metrics["objective"] == pytest.approx(float(expected.detach()), rel=1e-7)
    assert metrics["compared_share"] == pytest.approx(compared, rel=1e-6)
    assert compared < 1
    assert metrics["loss"] == pytest.approx(float(expected.detach()) / compared, rel=1e-6)
    for left, right in zip(actual, gradients(reference), strict=True):
        # Norms and rotations are single precision inside even a double model.
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-8)
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in actual))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-9)


def test_importance_weights_are_those_of_the_objective_but_not_of_the_reported_loss() -> None:
    importance = replace(UNIMPORTANT, config=ImportanceConfig(least=0.02))
    chosen = [sampled_with_certainty(item) for item in examples()]
    reference = double_student()
    reference.model.train()
    expected, compared = slow_loss(reference, chosen, importance=importance)
    expected.backward()
    unweighted, _ = slow_loss(double_student(), chosen)
    assert float(expected.detach()) < 0.8 * float(unweighted.detach())
    for budget in (30, 10_000):
        student = double_student()
        batches, tokens = packed(chosen, budget, importance=importance)
        metrics, actual = updated(student, batches, tokens)
        assert metrics["objective"] == pytest.approx(float(expected.detach()), rel=1e-6)
        assert metrics["loss"] == pytest.approx(float(unweighted.detach()) / compared, rel=1e-6)
        assert metrics["compared_share"] == pytest.approx(compared, rel=1e-6)
        for left, right in zip(actual, gradients(reference), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("budget", "micro_batches"), [(1, 4), (30, 3), (45, 2), (10_000, 1)])
def test_the_micro_batch_budget_changes_nothing(budget: int, micro_batches: int) -> None:
    batches, tokens = packed(examples(), budget)
    metrics, actual = updated(double_student(), batches, tokens)
    expected_metrics, expected = updated(double_student(), *packed(examples(), 10_000))
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-12)
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-10)
    assert len(batches) == micro_batches


@pytest.mark.parametrize("average", get_args(LossAverage))
def test_the_parts_of_two_ranks_sum_to_the_gradient_of_one(average: LossAverage) -> None:
    batches, tokens = packed(examples(), 10_000, average)
    _, expected = updated(double_student(), batches, tokens)
    parts = split([*pack(examples(), tokens_per_micro_batch=45, ranks=2, average=average)], 2)
    first, second = (updated(double_student(), part, tokens) for part in parts)
    for left, right, total in zip(first[1], second[1], expected, strict=True):
        torch.testing.assert_close(left + right, total, rtol=1e-6, atol=1e-10)
    shares = [metrics["compared_share"] for metrics, _ in (first, second)]
    assert min(shares) > 0
    assert sum(shares) == pytest.approx(
        updated(double_student(), batches, tokens)[0]["compared_share"]
    )


def test_the_order_of_examples_changes_nothing() -> None:
    expected_metrics, expected = updated(double_student(), *packed(examples(), 45))
    for order in list(permutations(examples()))[1::5]:
        metrics, actual = updated(double_student(), *packed(list(order), 45))
        assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-12)
        for left, right in zip(actual, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-10)


def test_in_single_precision_packing_changes_the_loss_only_by_rounding() -> None:
    (item, _), (other, _) = (updated(student_of(), *packed(examples(), n)) for n in (1, 10_000))
    assert item["loss"] == pytest.approx(other["loss"], abs=1e-6)


def test_only_rows_that_predict_completion_tokens_have_a_gradient() -> None:
    student = double_student()
    chosen = examples()
    batch = micro_batch(chosen)
    hidden: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: object, output: Any) -> None:
        output.last_hidden_state.retain_grad()
        hidden.append(output.last_hidden_state)

    hook = student.model.base_model.register_forward_hook(keep)
    updated(student, [batch], batch.slots)
    hook.remove()
    gradient = hidden[0].grad
    assert gradient is not None
    trained = torch.zeros(batch.input_ids.shape, dtype=torch.bool)
    for row, item in enumerate(chosen):
        first = len(item.rollout.prompt_token_ids) - 1
        starts = {int(at) for j in item.scores for at in j.alignment.student_starts}
        trained[row, [first + at for at in starts]] = True
    assert torch.equal(gradient.abs().sum(dim=-1) > 0, trained)
    assert 0 < int(trained.sum()) < trained.numel()


def test_what_stands_in_the_padding_changes_nothing() -> None:
    batch = micro_batch(examples())
    padding = batch.attention_mask == 0
    assert padding.any()
    other = replace(batch, input_ids=torch.where(padding, 77, batch.input_ids))
    metrics, actual = updated(double_student(), [batch], batch.slots)
    other_metrics, others = updated(double_student(), [other], batch.slots)
    assert metrics == other_metrics
    assert all(torch.equal(a, b) for a, b in zip(actual, others, strict=True))


@pytest.mark.parametrize("garbage", [1e30, -1e30])
def test_garbage_in_padding_rows_of_the_head_changes_nothing(garbage: float) -> None:
    clean, dirty = student_of(), student_of()
    size = clean.table.size
    with torch.no_grad():
        dirty.model.get_output_embeddings().weight[size:] = garbage
    batches, tokens = packed(examples(), 60)
    expected_metrics, expected = updated(clean, batches, tokens)
    metrics, actual = updated(dirty, batches, tokens)
    assert metrics == expected_metrics
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left, right)
    head = dirty.model.get_output_embeddings().weight
    assert head.grad is not None
    assert not head.grad[size:].any()
    assert (head[size:] == garbage).all()


def test_a_step_forgets_the_gradient_of_the_one_before() -> None:
    student, fresh = double_student(), double_student()
    updated(student, *packed(examples()[:2], 60))
    fresh.model.load_state_dict(student.model.state_dict())
    _, actual = updated(student, *packed(examples(), 60))
    _, expected = updated(fresh, *packed(examples(), 60))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_gradient_is_clipped_to_its_largest_norm() -> None:
    student = double_student()
    batches, tokens = packed(examples(), 60)
    metrics, _ = learner_of(student, max_grad_norm=0.01).update(batches, tokens=tokens, step=0)
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients(student)))
    assert norm == pytest.approx(0.01, rel=1e-3)
    unclipped, _ = updated(double_student(), batches, tokens)
    assert metrics["grad_norm"] == unclipped["grad_norm"] > 0.01


def test_the_next_micro_batch_is_prepared_while_one_is_trained() -> None:
    student = double_student()
    losses = losses_for(student)
    single = [each for each in examples() if len(each.scores) == 1]
    batches, tokens = packed(single, 1)
    started = [threading.Event() for _ in batches]

    class Gated:
        """A loss that is computed once the next micro-batch is being prepared."""

        def __init__(self, loss: Loss) -> None:
            self._loss = loss

        def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> Targets:
            next(event for event in started if not event.is_set()).set()
            return self._loss.targets(comparisons, offsets)

        def __call__(self, rows: StudentLogprobs, targets: Targets) -> LossOutput:
            trained.append(len(trained))
            assert started[min(trained[-1] + 1, len(started) - 1)].wait(60)
            return self._loss(rows, targets)

    trained: list[int] = []
    learner = Learner(
        student,
        StudentConfig(model="tiny"),
        losses={name: Gated(loss) for name, loss in losses.items()},
        teacher_weights=TEACHER_WEIGHTS,
        max_steps=10,
        seed=0,
    )
    learner.update(batches, tokens=tokens, step=0)
    assert len(trained) == len(batches) == len(single)


def poisoned_learner(student: Student, poison: float, **config: Any) -> Learner:
    """A learner after one honest step, whose gradients are spoilt from then on."""
    original = losses_for(student)

    class Poisoned:
        """An honest loss, spoilt."""

        targets = original["math"].targets

        def __call__(self, rows: StudentLogprobs, targets: TopKTargets) -> LossOutput:
            honest = original["math"](rows, targets)
            return replace(honest, per_token=honest.per_token * poison)

    learner = learner_of(student)
    batches, tokens = packed(examples(), 60)
    learner.update(batches, tokens=tokens, step=0)
    broken = Learner(
        student,
        StudentConfig(model="tiny", **config),
        losses={**original, "math": Poisoned()},
        teacher_weights=TEACHER_WEIGHTS,
        max_steps=10,
        seed=0,
    )
    broken.optimizer = learner.optimizer
    return broken


def state_of(student: Student, learner: Learner) -> list[Tensor]:
    """Weights, then moments."""
    moments = learner.optimizer.state_dict()["state"].values()
    tensors = [*student.model.parameters(), *(item for state in moments for item in state.values())]
    return [tensor.detach().clone() for tensor in tensors]


def assert_unchanged(student: Student, learner: Learner, before: list[Tensor]) -> None:
    after = state_of(student, learner)
    assert all(torch.equal(left, right) for left, right in zip(after, before, strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_ends_the_run_and_changes_nothing(poison: float) -> None:
    student = student_of()
    learner = poisoned_learner(student, poison)
    before = state_of(student, learner)
    with pytest.raises(TrainingError) as caught:
        update(learner, 2)
    assert caught.value.key == "student.on_nonfinite"
    assert_unchanged(student, learner, before)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_nonfinite_gradient_can_be_skipped_a_few_times_in_a_row(poison: float) -> None:
    student = student_of()
    learner = poisoned_learner(student, poison, on_nonfinite="skip", max_skipped_in_a_row=2)
    before = state_of(student, learner)
    for step in (1, 2):
        metrics, _ = update(learner, step)
        assert metrics["update/skipped_nonfinite"] == 1
        assert metrics["update/skipped_grad_norm"] == 0
        assert_unchanged(student, learner, before)
    healthy = learner_of(student)  # the weights are unchanged
    assert update(healthy, 3)[0]["update/skipped_nonfinite"] == 0
    with pytest.raises(TrainingError) as caught:
        update(learner, 4)
    assert caught.value.key == "student.max_skipped_in_a_row"


def test_an_exploding_gradient_is_skipped_and_a_normal_one_resets_the_count() -> None:
    student = student_of()
    learner = poisoned_learner(student, 1e6, skip_grad_norm_above=1e3, max_skipped_in_a_row=1)
    [few], tokens = packed(examples()[1:2], 60)  # of the other teacher, whose loss is honest
    for step in (1, 3):
        before = state_of(student, learner)
        metrics, _ = update(learner, step)
        assert metrics["grad_norm"] > 1e3
        assert metrics["update/skipped_grad_norm"] == 1
        assert metrics["update/skipped_nonfinite"] == 0
        assert_unchanged(student, learner, before)
        metrics, _ = learner.update([few], tokens=tokens, step=step + 1)
        assert metrics["grad_norm"] < 1e3
        assert metrics["update/skipped_grad_norm"] == 0
    with pytest.raises(AssertionError):
        assert_unchanged(student, learner, before)


def test_a_step_without_samples_is_skipped_a_few_times_in_a_row() -> None:
    student = student_of()
    learner = learner_of(student, max_skipped_in_a_row=2)
    update(learner, 0)
    before = state_of(student, learner)

    def update_empty(step: int) -> dict[str, float]:
        why = {"dropped/math/too_long": 3.0, "dropped/total": 3.0}
        metrics, losses = learner.update([], tokens=0, step=step, dropped=why)
        assert not losses
        return metrics

    for step in (1, 2):
        metrics = update_empty(step)
        assert math.isnan(metrics["loss"])
        assert math.isnan(metrics["grad_norm"])
        assert metrics["update/skipped_empty"] == 1
        assert_unchanged(student, learner, before)
    with pytest.raises(TrainingError, match=r"step 4: .*\(math/too_long 3, total 3\)") as caught:
        update_empty(3)
    assert caught.value.key == "student.max_skipped_in_a_row"
    metrics, _ = update(learner, 3)
    assert metrics.keys() == update_empty(4).keys()  # an honest step ends the row
    assert metrics["update/skipped_empty"] == 0


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_nonfinite_loss_is_skipped_for_any_gradient(loss: float) -> None:
    guard = UpdateGuard(StudentConfig(model="tiny", on_nonfinite="skip"))
    assert guard.check(loss=loss, norm=1.0, step=0)["update/skipped_nonfinite"] == 1
    assert guard.check(loss=1.0, norm=1.0, step=1)["update/skipped_nonfinite"] == 0


def test_a_step_moves_the_weights_towards_the_teachers() -> None:
    student = student_of()
    learner = learner_of(student, learning_rate=1e-2)
    batches, tokens = packed(examples(), 60)
    messages = [learner.update(batches, tokens=tokens, step=step)[0]["loss"] for step in range(6)]
    assert messages == sorted(messages, reverse=True)
    assert messages[-1] < 0.9 * messages[0]


def test_a_step_uses_the_learning_rate_of_its_number() -> None:
    student = student_of()
    learner = learner_of(student, learning_rate=1e-3, warmup_steps=4)
    batches, tokens = packed(examples(), 60)
    before = [parameter.detach().clone() for parameter in student.model.parameters()]
    metrics, _ = learner.update(batches, tokens=tokens, step=1)
    assert metrics["learning_rate"] == pytest.approx(5e-4)
    moved = max(
        float((parameter - old).abs().max().detach())
        for parameter, old in zip(student.model.parameters(), before, strict=True)
    )
    assert moved == pytest.approx(5e-4, rel=1e-2)  # Adam's first step is its learning rate


def test_the_learning_rate_warms_up_and_follows_a_cosine_to_its_floor() -> None:
    config = StudentConfig(
        model="tiny", learning_rate=2.0, warmup_steps=4, min_learning_rate_ratio=0.1
    )
    actual = [config.learning_rate_at(step, max_steps=12) for step in range(13)]
    assert actual[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert actual[8] == pytest.approx(1.1)  # half way: the mean of top and floor
    assert actual[12] == pytest.approx(0.2)
    assert actual[4:] == sorted(actual[4:], reverse=True)
    flat = StudentConfig(model="tiny", learning_rate=2.0, min_learning_rate_ratio=1.0)
    assert {flat.learning_rate_at(step, max_steps=3) for step in range(3)} == {2.0}
    assert config.learning_rate_at(0, max_steps=2) == 0.5  # a warm-up longer than the run
