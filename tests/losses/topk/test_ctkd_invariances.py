"""What must not change the loss, and in which direction it must change."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.topk.ctkd import Divergence
from mopd_losses.topk.topk_targets import TopKTargets
from tests.losses.dense import ctkd
from tests.losses.places import (
    DIVERGENCES,
    Problem,
    device_projection,
    identity,
    random_problem,
    targets_of,
)

seeds = st.integers(0, 2**32)
both = pytest.mark.parametrize("divergence", DIVERGENCES)


def value_and_gradient(
    problem: Problem, divergence: Divergence, temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    logits = problem.logits.detach().clone().requires_grad_()
    moved = Problem(logits, problem.targets, problem.weights, problem.real)
    found = moved.loss(divergence, temperature).per_token
    found.sum().backward()
    assert logits.grad is not None
    return found.detach().numpy(), logits.grad.numpy()


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    scale = 1 + np.abs(expected).max(initial=0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8 * scale)


@both
@given(seeds)
@settings(deadline=None, max_examples=40)
def test_adding_a_number_to_all_logits_of_a_row_changes_nothing(
    divergence: Divergence, seed: int
) -> None:
    problem = random_problem(seed)
    shifts = torch.linspace(-50, 50, len(problem.logits)).unsqueeze(1)
    shifted = Problem(problem.logits + shifts, problem.targets, problem.weights, problem.real)
    for found, expected in zip(
        value_and_gradient(shifted, divergence),
        value_and_gradient(problem, divergence),
        strict=True,
    ):
        assert_close(found, expected)


@both
def test_in_float32_too_a_shift_of_all_logits_changes_nothing(divergence: Divergence) -> None:
    draw = np.random.default_rng(0)
    logits = torch.tensor(draw.normal(size=(50, 20)) * 4).bfloat16().float()
    logits[:, 0] += 16  # nearly certain, so that the tail is a small difference
    teacher = 0.5 * logits.softmax(dim=1).double().numpy() + 0.5 * draw.dirichlet(np.ones(20), 50)
    targets = targets_of(teacher, [[0, 1, 2]] * 50)
    plain, shifted = (
        ctkd(logits + shift, targets, identity(20), divergence=divergence).per_token
        for shift in (0, 128)
    )
    assert torch.equal(plain, shifted)
    exact = ctkd(logits.double(), targets, identity(20), divergence=divergence).per_token
    torch.testing.assert_close(plain.double(), exact, rtol=1e-2, atol=1e-3)


@both
@given(seeds)
@settings(deadline=None, max_examples=40)
def test_the_order_of_entries_and_of_vocabularies_changes_nothing(
    divergence: Divergence, seed: int
) -> None:
    problem = random_problem(seed)
    draw = np.random.default_rng(seed)
    rows, columns = (draw.permutation(size) for size in problem.weights.shape)
    entries = torch.tensor(draw.permutation(problem.targets.ids.shape[1]), dtype=torch.int64)
    new_id = torch.tensor([*np.argsort(columns), -1])  # the last for absent entries
    targets = TopKTargets(
        problem.targets.slots,
        new_id[problem.targets.ids[:, entries]],
        problem.targets.logprobs[:, entries],
        problem.targets.tail_logprobs,
    )
    permuted = Problem(
        problem.logits[:, torch.tensor(rows)],
        targets,
        problem.weights[np.ix_(rows, columns)],
        problem.real[rows],
    )
    value, gradient = value_and_gradient(permuted, divergence)
    expected_value, expected_gradient = value_and_gradient(problem, divergence)
    assert_close(value, expected_value)
    assert_close(gradient, expected_gradient[:, rows])


@both
@given(seeds)
@settings(deadline=None, max_examples=40)
def test_absent_entries_change_nothing(divergence: Divergence, seed: int) -> None:
    problem = random_problem(seed)
    targets = problem.targets
    absent = (len(targets.slots), 2)
    widened = TopKTargets(
        targets.slots,
        torch.cat([torch.full(absent, -1), targets.ids], dim=1),
        torch.cat([torch.full(absent, -torch.inf), targets.logprobs], dim=1),
        targets.tail_logprobs,
    )
    wide = Problem(problem.logits, widened, problem.weights, problem.real)
    for found, expected in zip(
        value_and_gradient(wide, divergence), value_and_gradient(problem, divergence), strict=True
    ):
        assert_close(found, expected)


@both
@pytest.mark.parametrize("garbage", [0.0, 1e4, -1e4, float("nan"), float("inf")])
def test_garbage_in_padding_rows_of_the_head_changes_neither_loss_nor_gradient(
    divergence: Divergence, garbage: float
) -> None:
    draw = np.random.default_rng(0)
    weights = np.zeros((9, 5))
    weights[np.arange(6), [0, 1, 2, 3, 4, 0]] = 1
    logits = torch.tensor(draw.normal(size=(3, 9)))
    targets = targets_of(draw.dirichlet(np.ones(5), size=3), [[0, 1], [4], [2, 3, 0]])
    real = np.arange(9) < 6
    narrow = Problem(logits[:, :6], targets, weights[:6], real[:6])
    expected_value, expected_gradient = value_and_gradient(narrow, divergence)
    padded = logits.clone()
    padded[:, 6:] = garbage
    value, gradient = value_and_gradient(Problem(padded, targets, weights, real), divergence)
    np.testing.assert_array_equal(value, expected_value)
    np.testing.assert_array_equal(gradient[:, :6], expected_gradient)
    np.testing.assert_array_equal(gradient[:, 6:], 0)


@both
@given(seeds)
@settings(deadline=None, max_examples=40)
def test_the_loss_is_never_negative(divergence: Divergence, seed: int) -> None:
    # Reverse: the student's tail is kept above 1e-6 and the teacher's above 1e-4.
    floor = 0.0 if divergence == "forward_kl" else 1e-4
    problem = random_problem(seed)
    assert (problem.loss(divergence).per_token >= -floor - 1e-12).all()


@both
def test_one_hundred_thousand_random_pairs_are_never_below_zero(divergence: Divergence) -> None:
    draw = np.random.default_rng(0)
    teacher = draw.dirichlet(np.full(6, 0.7), size=100_000)
    student = torch.tensor(draw.dirichlet(np.full(6, 0.7), size=100_000)).clamp_min(1e-300)
    ids = torch.tensor([[0, 1, 2]]).repeat(100_000, 1)
    kept = torch.tensor(teacher[:, :3]).log()
    tail = torch.tensor(teacher[:, 3:].sum(axis=1)).log()
    targets = TopKTargets(torch.arange(100_000), ids, kept, tail)
    found = ctkd(student.log(), targets, identity(6), divergence=divergence).per_token
    assert found.min() >= (-1e-12 if divergence == "forward_kl" else -1e-4)
    full = torch.tensor(teacher) * (torch.tensor(teacher).log() - student.log())
    if divergence == "reverse_kl":
        full = student * (student.log() - torch.tensor(teacher).log())
    floored = teacher[:, 3:].sum(axis=1) >= 1e-4
    assert (found <= full.nan_to_num().sum(dim=1) + 2e-5)[torch.tensor(floored)].all()


@both
@given(seeds)
@settings(deadline=None, max_examples=25)
def test_more_entries_never_lower_the_loss_and_all_give_the_full_divergence(
    divergence: Divergence, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    teacher = draw.dirichlet(np.full(8, 1.0), size=1).clip(1e-9)
    teacher /= teacher.sum()
    logits = torch.tensor(draw.normal(size=(1, 8)))
    order = np.argsort(-teacher[0]).tolist()
    # Above 1e-4 no floor has a say.
    rest = [teacher[0, order[k:]].sum() for k in range(9)]
    values = [
        ctkd(
            logits, targets_of(teacher, [order[:k]]), identity(8), divergence=divergence
        ).per_token.item()
        for k in range(9)
    ]
    values_kept = [v for v, r in zip(values[:8], rest[:8], strict=True) if r > 1e-4]
    assert values[0] == pytest.approx(0, abs=1e-12)
    assert (np.diff(values_kept) >= -1e-10).all()
    log_t, log_p = torch.tensor(teacher).log(), logits.log_softmax(dim=1)
    full = torch.nn.functional.kl_div(log_p, log_t, log_target=True, reduction="sum")
    if divergence == "reverse_kl":
        full = torch.nn.functional.kl_div(log_t, log_p, log_target=True, reduction="sum")
    margin = 1e-10 if divergence == "forward_kl" else 1e-5
    assert values[8] == pytest.approx(full.item(), abs=margin)
    assert max(values_kept) <= full.item() + 1e-10


@both
@given(seeds)
@settings(deadline=None, max_examples=40)
def test_at_equality_value_and_gradient_are_zero(divergence: Divergence, seed: int) -> None:
    draw = np.random.default_rng(seed)
    weights = draw.dirichlet(np.ones(5), size=7)
    logits = torch.tensor(draw.normal(size=(2, 7)))
    teacher = (logits.softmax(dim=1) @ torch.tensor(weights)).numpy()
    kept = [[0, 3], [1, 2, 4]]
    problem = Problem(logits, targets_of(teacher, kept), weights, np.ones(7, dtype=np.bool_))
    value, gradient = value_and_gradient(problem, divergence)
    np.testing.assert_allclose(value, 0, atol=1e-12)
    np.testing.assert_allclose(gradient, 0, atol=1e-12)


@both
@given(seeds, st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_with_one_vocabulary_the_loss_is_the_kl_of_the_two_coarse_distributions(
    divergence: Divergence, seed: int, k: int
) -> None:
    draw = np.random.default_rng(seed)
    teacher = 0.9 * draw.dirichlet(np.ones(7), size=3) + 0.1 / 7  # no tail under the floor
    logits = torch.tensor(draw.normal(size=(3, 7)), requires_grad=True)
    kept = [draw.choice(7, k, replace=False).tolist() for _ in range(3)]
    found = ctkd(logits, targets_of(teacher, kept), identity(7), divergence=divergence).per_token

    def coarse(probabilities: torch.Tensor) -> torch.Tensor:
        rows = torch.stack([row[ids] for row, ids in zip(probabilities, kept, strict=True)])
        return torch.cat([rows, 1 - rows.sum(dim=1, keepdim=True)], dim=1)

    p, t = coarse(logits.softmax(dim=1)), coarse(torch.tensor(teacher))
    a, b = (t, p) if divergence == "forward_kl" else (p, t)
    expected = (a * (a / b).log()).sum(dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    (ours,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@both
@pytest.mark.parametrize("temperature", [0.5, 2.0, 10.0])
def test_a_temperature_divides_the_logits_and_squares_the_value(
    divergence: Divergence, temperature: float
) -> None:
    draw = np.random.default_rng(1)
    logits = torch.tensor(draw.normal(size=(2, 6)) * 3, requires_grad=True)
    teacher = torch.tensor(draw.normal(size=(2, 6)) * 3).div(temperature).softmax(dim=1)
    targets = targets_of(teacher.numpy(), [[0, 1, 2, 3, 4]] * 2)
    found = ctkd(
        logits, targets, identity(6), divergence=divergence, temperature=temperature
    ).per_token
    log_p, log_t = (logits / temperature).log_softmax(dim=1), teacher.log()
    a, b = (log_t, log_p) if divergence == "forward_kl" else (log_p, log_t)
    expected = temperature**2 * (a.exp() * (a - b)).sum(dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    (ours,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    assert not torch.allclose(found, ctkd(logits, targets, identity(6)).per_token, rtol=1e-2)


def test_several_tokens_that_feed_one_id_share_its_gradient_by_their_part() -> None:
    weights = np.array([[1.0, 0], [1.0, 0], [0, 1.0]])
    projection = device_projection(weights, np.ones(3, dtype=np.bool_))
    student = torch.tensor([[0.1, 0.3, 0.6]], dtype=torch.float64)
    logits = student.log().requires_grad_()
    ctkd(logits, targets_of(np.array([[0.8, 0.2]]), [[0]]), projection).per_token.sum().backward()
    assert logits.grad is not None
    # Q - t on the bucket, split 1 : 3 between the two; the rest is one token.
    np.testing.assert_allclose(logits.grad[0].numpy(), [-0.1, -0.3, 0.4], atol=1e-12)
