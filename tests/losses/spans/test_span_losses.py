"""Every loss on spans: it equals its slow reference, and what must not change it does not."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopd_losses.core.blockwise_head import Head, LossTerm, blockwise_head
from mopd_losses.core.student_rows import DenseRows
from tests.losses.span_losses import CASES, Case
from tests.losses.span_problems import (
    Floats,
    Problem,
    random_problem,
    scattered,
    value_and_gradient,
)

seeds = st.integers(0, 2**32)
every_loss = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def run(case: Case, problem: Problem) -> tuple[Floats, Floats]:
    """Value and gradient of the fast form."""
    problem = problem.with_logits(problem.logits.detach().clone().requires_grad_())
    loss = case.make(problem)
    targets = case.targets(problem)
    return value_and_gradient(problem, loss(problem.rows(), targets))


def assert_close(found: Floats, expected: Floats, tolerance: float = 1e-9) -> None:
    scale = 1 + np.abs(expected).max(initial=0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


@every_loss
@given(seed=seeds)
@settings(deadline=None, max_examples=20)
def test_value_and_gradient_equal_the_slow_reference(case: Case, seed: int) -> None:
    problem = random_problem(seed)
    value, gradient = run(case, problem)
    expected_value, expected_gradient = scattered(problem, case.expected(problem))
    assert_close(value, expected_value, 1e-10)
    assert_close(gradient, expected_gradient, 1e-8)


@every_loss
@given(seed=seeds)
@settings(deadline=None, max_examples=5)
def test_targets_of_what_was_sent_are_the_exact_ones_but_for_rounding(
    case: Case, seed: int
) -> None:
    problem = random_problem(seed)
    loss = case.make(problem)
    found = loss(problem.rows(), loss.targets(problem.comparisons, problem.offsets)).per_token
    exact = loss(problem.rows(), case.targets(problem)).per_token
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@every_loss
@pytest.mark.parametrize("seed", [0, 5])
def test_gradcheck(case: Case, seed: int) -> None:
    problem = random_problem(seed, completions=1)
    loss = case.make(problem)
    targets = loss.targets(problem.comparisons, problem.offsets)

    def value(logits: Tensor) -> Tensor:
        return loss(DenseRows(logits, torch.tensor(problem.real)), targets).per_token

    assert torch.autograd.gradcheck(value, problem.logits.requires_grad_(), atol=1e-6, rtol=1e-4)


@every_loss
@given(seed=seeds)
@settings(deadline=None, max_examples=5)
def test_adding_a_number_to_all_logits_of_a_row_changes_nothing(case: Case, seed: int) -> None:
    problem = random_problem(seed)
    shifts = torch.linspace(-40, 40, len(problem.logits)).unsqueeze(1)
    shifted = problem.with_logits(problem.logits + shifts)
    for found, expected in zip(run(case, shifted), run(case, problem), strict=True):
        assert_close(found, expected)


@every_loss
@pytest.mark.parametrize("garbage", [0.0, 1e4, float("nan"), float("inf")])
def test_garbage_in_padding_rows_of_the_head_changes_nothing(case: Case, garbage: float) -> None:
    for seed in range(4):
        problem = random_problem(seed)
        padded = problem.logits.clone()
        padded[:, ~torch.tensor(problem.real)] = garbage
        value, gradient = run(case, problem.with_logits(padded))
        expected_value, expected_gradient = run(case, problem)
        np.testing.assert_array_equal(value, expected_value)
        np.testing.assert_array_equal(gradient[:, problem.real], expected_gradient[:, problem.real])


@every_loss
@given(seed=seeds)
@settings(deadline=None, max_examples=5)
def test_the_order_in_which_completions_are_packed_changes_nothing(case: Case, seed: int) -> None:
    problem = random_problem(seed)
    value, gradient = run(case, problem)
    slots: list[int] = []
    offsets: list[int] = []
    for comparison, offset in reversed(
        list(zip(problem.comparisons, problem.offsets, strict=True))
    ):
        offsets.append(len(slots))
        slots += range(offset, offset + len(comparison.student))
    packed = Problem(
        problem.logits[slots],
        problem.real,
        problem.comparisons[::-1],
        offsets,
        problem.teacher_size,
        problem.partner,
        problem.weights,
    )
    found_value, found_gradient = run(case, packed)
    assert_close(found_value, value[slots])
    assert_close(found_gradient, gradient[slots])


@every_loss
@given(seed=seeds)
@settings(deadline=None, max_examples=5)
def test_how_completions_are_split_into_micro_batches_changes_nothing(
    case: Case, seed: int
) -> None:
    if case.couples_rows:  # see test_pkl_parity: one support a micro-batch, by design
        return
    problem = random_problem(seed)
    value, gradient = run(case, problem)
    for comparison, offset in zip(problem.comparisons, problem.offsets, strict=True):
        slots = slice(offset, offset + len(comparison.student))
        alone = Problem(
            problem.logits[slots],
            problem.real,
            [comparison],
            [0],
            problem.teacher_size,
            problem.partner,
            problem.weights,
        )
        found_value, found_gradient = run(case, alone)
        assert_close(found_value, value[slots])
        assert_close(found_gradient, gradient[slots])


@every_loss
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [0, 3])
def test_without_completions_it_costs_nothing_and_keeps_its_graph(
    case: Case, dtype: torch.dtype, slots: int
) -> None:
    problem = random_problem(1, completions=0)
    loss = case.make(problem)
    logits = torch.randn(slots, problem.logits.shape[1]).to(dtype).requires_grad_()
    output = loss(DenseRows(logits, torch.tensor(problem.real)), loss.targets([], []))
    assert output.per_token.tolist() == [0.0] * slots
    assert {len(column) for column in output.measured.values()} == {0}
    output.per_token.sum().backward()
    assert logits.grad is not None
    assert (logits.grad == 0).all()


@every_loss
@given(seed=seeds, rows_per_block=st.sampled_from([1, 2, 7]))
@settings(deadline=None, max_examples=5)
def test_the_blockwise_head_equals_the_dense_form(
    case: Case, seed: int, rows_per_block: int
) -> None:
    problem = random_problem(seed)
    loss = case.make(problem)
    targets = loss.targets(problem.comparisons, problem.offsets)
    generator = torch.Generator().manual_seed(seed)
    slots, width = problem.logits.shape
    hidden, weight = (
        torch.randn(rows, 4, dtype=torch.float64, generator=generator, requires_grad=True)
        for rows in (slots, width)
    )
    slot_weights = torch.rand(slots, dtype=torch.float64, generator=generator)
    real = torch.tensor(problem.real)
    dense = loss(DenseRows(hidden @ weight.T, real), targets)
    expected = (dense.per_token * slot_weights).sum()
    found, outputs = blockwise_head(
        hidden, Head(weight, real), [LossTerm(loss, targets, slot_weights)],
        rows_per_block=rows_per_block,
    )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(outputs[0].per_token, dense.per_token.detach())
    if slots:
        assert set(outputs[0].measured) == set(dense.measured)
        for name, column in outputs[0].measured.items():
            torch.testing.assert_close(column, dense.measured[name], equal_nan=True)
    for ours, theirs in zip(
        torch.autograd.grad(found, (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@every_loss
@given(seed=seeds)
@settings(deadline=None, max_examples=5)
def test_ids_that_the_student_rules_out_leave_everything_finite(case: Case, seed: int) -> None:
    problem = random_problem(seed)
    draw = np.random.default_rng(seed)
    logits = problem.logits.clone()
    out = torch.tensor(draw.random(logits.shape) < 0.3)
    out[:, 0] = False
    for found in run(case, problem.with_logits(logits.masked_fill(out, -torch.inf))):
        assert np.isfinite(found).all()
    for found in run(case, problem.with_logits(logits.masked_fill(out, -1e4))):
        assert np.isfinite(found).all()


@every_loss
def test_half_precision_logits_are_within_a_hundredth(case: Case) -> None:
    for seed in range(6):
        problem = random_problem(seed)
        rounded = problem.logits.bfloat16()
        loss = case.make(problem)
        targets = loss.targets(problem.comparisons, problem.offsets)
        real = torch.tensor(problem.real)
        found = loss(DenseRows(rounded, real), targets).per_token
        assert found.dtype == torch.float32
        exact = loss(DenseRows(rounded.double(), real), targets).per_token
        torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-4)


@every_loss
def test_targets_moved_to_a_device_are_the_same_targets(case: Case) -> None:
    problem = random_problem(3, completions=3)
    loss = case.make(problem)
    targets = loss.targets(problem.comparisons, problem.offsets)
    found, expected = (loss(problem.rows(), t).per_token for t in (targets.to("cpu"), targets))
    assert torch.equal(found, expected)


@every_loss
def test_what_is_measured_has_no_graph(case: Case) -> None:
    problem = random_problem(3, completions=3)
    problem.logits.requires_grad_()
    loss = case.make(problem)
    output = loss(problem.rows(), loss.targets(problem.comparisons, problem.offsets))
    assert output.measured
    for column in output.measured.values():
        assert not column.requires_grad
        assert column.isfinite().all()
