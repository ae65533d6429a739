"""The student's distribution through a projection: softmax and a dense product."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.core.student_rows import DenseRows
from mopd_losses.projection.projected_logprobs import projected_logprobs
from tests.losses.topk_problems import device_projection, random_problem
from tests.reference.topk_divergence import project, softmax


def test_the_published_projection() -> None:
    weights = np.array([[1, 0, 0, 0], [0, 1 / 1.1, 0.1 / 1.1, 0], [0, 0, 0, 1]])
    student = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    expected = [0.5, 0.272727, 0.027273, 0.2]
    projection = device_projection(weights, np.ones(3, dtype=np.bool_))
    rows, ids = DenseRows(student.log(), projection.real_ids), torch.tensor([[0, 1, 2, 3, -1]])
    projected = projected_logprobs(rows, torch.tensor([0]), ids, projection).exp()
    np.testing.assert_allclose(projected[0].numpy(), [*expected, 0], atol=5e-7)
    assert project([0.5, 0.3, 0.2], weights.tolist()) == pytest.approx(expected, abs=5e-7)


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=10)
def test_projected_logprobs_equal_softmax_and_a_dense_product(seed: int) -> None:
    problem = random_problem(seed)
    positions = torch.arange(len(problem.logits))
    ids = torch.arange(problem.weights.shape[1]).repeat(len(positions), 1)
    rows = DenseRows(problem.logits, torch.tensor(problem.real))
    projected = projected_logprobs(rows, positions, ids, problem.projection()).exp()
    for row, logits in zip(projected.tolist(), problem.logits.tolist(), strict=True):
        p = softmax(logits, problem.real.tolist(), 1.0)
        assert row == pytest.approx(project(p, problem.weights.tolist()), abs=1e-13)


def test_projected_logprobs_are_exact_where_all_masses_underflow() -> None:
    weights = np.array([[1.0, 0], [0.5, 0.5], [0, 1]])
    projection = device_projection(weights, np.ones(3, dtype=np.bool_))
    logits = torch.tensor([[0.0, -5000.0, -5000.0]], dtype=torch.float64)
    rows = DenseRows(logits, projection.real_ids)
    projected = projected_logprobs(rows, torch.tensor([0]), torch.tensor([[1]]), projection)
    assert projected.item() == pytest.approx(-5000 + np.log(1.5), abs=1e-9)
