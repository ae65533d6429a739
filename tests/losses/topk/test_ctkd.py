"""CTKD against the slow reference, and the numbers of losses.md Appendix A."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.core.student_rows import DenseRows
from mopd_losses.projection.projected_logprobs import projected_logprobs
from mopd_losses.topk.ctkd import Divergence
from tests.losses.dense import ctkd
from tests.losses.places import (
    DIVERGENCES,
    Problem,
    device_projection,
    identity,
    random_problem,
    reference_places,
    targets_of,
)
from tests.reference.ctkd import place, project, softmax

seeds = st.integers(0, 2**32)
both = pytest.mark.parametrize("divergence", DIVERGENCES)

TEACHER = np.array([[0.6, 0.25, 0.1, 0.05]])
STUDENT = torch.tensor([[0.35, 0.3, 0.3, 0.05]], dtype=torch.float64)
GOLDEN = {"forward_kl": 0.150723, "reverse_kl": 0.162602}


@both
def test_the_loss_gives_the_published_numbers(divergence: Divergence) -> None:
    found = ctkd(STUDENT.log(), targets_of(TEACHER, [[0, 1]]), identity(4), divergence=divergence)
    assert found.per_token.item() == pytest.approx(GOLDEN[divergence], abs=5e-7)
    assert found.measured["teacher_mass"].item() == pytest.approx(0.85)
    assert found.measured["student_mass"].item() == pytest.approx(0.65)


def test_the_forward_gradient_is_the_published_one() -> None:
    logits = STUDENT.log().requires_grad_()
    ctkd(logits, targets_of(TEACHER, [[0, 1]]), identity(4)).per_token.sum().backward()
    assert logits.grad is not None
    expected = [-0.25, 0.05, 0.171429, 0.028571]
    np.testing.assert_allclose(logits.grad[0].numpy(), expected, atol=5e-7)


@both
def test_the_reference_gives_the_published_numbers_too(divergence: Divergence) -> None:
    found = place(
        STUDENT.log()[0].tolist(),
        [True] * 4,
        np.eye(4).tolist(),
        {0: 0.6, 1: 0.25},
        0.15,
        forward=divergence == "forward_kl",
    )
    assert found.value == pytest.approx(GOLDEN[divergence], abs=5e-7)
    if divergence == "forward_kl":
        assert found.gradient == pytest.approx([-0.25, 0.05, 0.171429, 0.028571], abs=5e-7)


def test_the_student_is_projected_as_published() -> None:
    weights = np.array([[1, 0, 0, 0], [0, 1 / 1.1, 0.1 / 1.1, 0], [0, 0, 0, 1]])
    student = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    expected = [0.5, 0.272727, 0.027273, 0.2]
    projection = device_projection(weights, np.ones(3, dtype=np.bool_))
    ids = torch.tensor([[0, 1, 2, 3, -1]])
    found = projected_logprobs(
        DenseRows(student.log(), projection.real_ids), torch.tensor([0]), ids, projection
    ).exp()
    np.testing.assert_allclose(found[0].numpy(), [*expected, 0], atol=5e-7)
    assert project([0.5, 0.3, 0.2], weights.tolist()) == pytest.approx(expected, abs=5e-7)


@both
@given(seeds, st.sampled_from([0.5, 1.0, 2.0]))
@settings(deadline=None, max_examples=25)
def test_the_references_gradient_is_the_slope_of_its_value(
    divergence: Divergence, seed: int, temperature: float
) -> None:
    problem = random_problem(seed)
    forward = divergence == "forward_kl"
    tiny = 1e-6

    def moved(column: int, by: float) -> Problem:
        logits = problem.logits.clone()
        logits[:, column] += by
        return Problem(logits, problem.targets, problem.weights, problem.real)

    found = reference_places(problem, forward=forward, temperature=temperature)
    for column in range(problem.logits.shape[1]):
        sides = [
            reference_places(moved(column, by), forward=forward, temperature=temperature)
            for by in (tiny, -tiny)
        ]
        for here, up, down in zip(found, *sides, strict=True):
            slope = (up.value - down.value) / (2 * tiny)
            assert here.gradient[column] == pytest.approx(slope, abs=2e-5, rel=1e-4)


@both
@given(seeds, st.sampled_from([0.5, 1.0, 3.0]))
@settings(deadline=None, max_examples=100)
def test_value_and_gradient_equal_the_slow_reference(
    divergence: Divergence, seed: int, temperature: float
) -> None:
    problem = random_problem(seed)
    problem.logits.requires_grad_()
    places = reference_places(problem, forward=divergence == "forward_kl", temperature=temperature)
    output = problem.loss(divergence, temperature)
    values = [0.0] * len(problem.logits)
    gradient = np.zeros(problem.logits.shape)
    scale = torch.linspace(1, 2, len(problem.logits), dtype=torch.float64)
    for slot, expected in zip(problem.targets.slots.tolist(), places, strict=True):
        values[slot] = expected.value
        gradient[slot] = np.array(expected.gradient) * scale[slot].item()
    np.testing.assert_allclose(output.per_token.detach().numpy(), values, rtol=1e-9, atol=1e-10)
    (output.per_token * scale).sum().backward()
    assert problem.logits.grad is not None
    tolerance = 1e-8 * (1 + np.abs(gradient).max(initial=0))
    np.testing.assert_allclose(problem.logits.grad.numpy(), gradient, rtol=0, atol=tolerance)


@given(seeds, st.sampled_from([0.5, 1.0, 3.0]))
@settings(deadline=None, max_examples=100)
def test_measured_masses_equal_slow_sums(seed: int, temperature: float) -> None:
    problem = random_problem(seed)
    places = reference_places(problem, forward=True, temperature=temperature)
    measured = problem.loss("forward_kl", temperature).measured
    assert set(measured) == {"teacher_mass", "student_mass", "unsupported_mass", "unprojected_mass"}
    for name, found in measured.items():
        expected = [getattr(place, name) for place in places]
        # What is retained is held below one by a margin of 1e-6.
        np.testing.assert_allclose(found.numpy(), expected, atol=1.1e-6)
        assert not found.requires_grad


@both
@given(seeds)
@settings(deadline=None, max_examples=15)
def test_gradcheck(divergence: Divergence, seed: int) -> None:
    problem = random_problem(seed)
    logits = torch.tanh(problem.logits).requires_grad_()

    def value(z: torch.Tensor) -> torch.Tensor:
        return Problem(z, problem.targets, problem.weights, problem.real).loss(divergence).per_token

    assert torch.autograd.gradcheck(value, logits, atol=1e-5, rtol=1e-4)


@given(seeds)
@settings(deadline=None, max_examples=40)
def test_projected_logprobs_equal_softmax_and_a_dense_product(seed: int) -> None:
    problem = random_problem(seed)
    size = problem.weights.shape[1]
    slots = torch.arange(len(problem.logits))
    ids = torch.arange(size).repeat(len(slots), 1)
    rows = DenseRows(problem.logits, torch.tensor(problem.real))
    found = projected_logprobs(rows, slots, ids, problem.projection())
    for row, logits in zip(found.exp().tolist(), problem.logits.tolist(), strict=True):
        p = softmax(logits, problem.real.tolist(), 1.0)
        assert row == pytest.approx(project(p, problem.weights.tolist()), abs=1e-13)


def test_projected_logprobs_are_exact_where_all_masses_underflow() -> None:
    weights = np.array([[1.0, 0], [0.5, 0.5], [0, 1]])
    projection = device_projection(weights, np.ones(3, dtype=np.bool_))
    logits = torch.tensor([[0.0, -5000.0, -5000.0]], dtype=torch.float64)
    rows = DenseRows(logits, projection.real_ids)
    found = projected_logprobs(rows, torch.tensor([0]), torch.tensor([[1]]), projection)
    assert found.item() == pytest.approx(-5000 + np.log(1.5), abs=1e-9)
