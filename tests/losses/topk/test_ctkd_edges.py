"""Extreme, empty and ill-fitting input: finite values, finite gradients, a graph, or a sentence."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.topk.ctkd import Divergence
from mopd_losses.topk.ctkd import ctkd as ctkd_on_rows
from mopd_losses.topk.topk_targets import TopKTargets, topk_targets
from mopd_protocol.errors import DataError
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.dense import ctkd
from tests.losses.places import (
    DIVERGENCES,
    Problem,
    device_projection,
    identity,
    random_problem,
    targets_of,
)
from tests.losses.sequences import sequence

both = pytest.mark.parametrize("divergence", DIVERGENCES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])

#: Teachers and students that are as sure as can be, of the same and of other things.
ONE_HOT = np.array([[1.0, 0, 0, 0], [0, 0, 0, 1], [0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25]])


def nothing(places: int = 0, k: int = 0) -> TopKTargets:
    return TopKTargets(
        torch.arange(places),
        torch.full((places, k), -1),
        torch.full((places, k), -torch.inf),
        torch.zeros(places),
    )


@both
@pytest.mark.parametrize("kept", [[], [0], [0, 1], [3], [0, 1, 2, 3]])
@pytest.mark.parametrize("sure_of", [0, 1, 3])
@pytest.mark.parametrize("size", [1e4, -1e4, 60.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_extreme_logits_and_one_hot_teachers_stay_finite(
    divergence: Divergence, kept: list[int], sure_of: int, size: float, dtype: torch.dtype
) -> None:
    logits = torch.zeros(4, 4, dtype=dtype)
    logits[:, sure_of] = size
    logits.requires_grad_()
    kept_here = [[token for token in kept if row[token] > 0] for row in ONE_HOT]
    targets = targets_of(ONE_HOT, kept_here)
    found = ctkd(logits, targets, identity(4), divergence=divergence)
    found.per_token.sum().backward()
    assert found.per_token.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    for name, mass in found.measured.items():
        assert mass.isfinite().all(), name
        assert (mass >= -1e-6).all(), name
        assert (mass <= 1 + 1e-6).all(), name


@both
def test_a_student_that_rules_an_id_out_is_compared_on_the_others(divergence: Divergence) -> None:
    teacher = np.array([[0.5, 0.2, 0.2, 0.1]])
    logits = torch.tensor([[1.0, -torch.inf, 0.5, 0.2]], dtype=torch.float64, requires_grad=True)
    found = ctkd(logits, targets_of(teacher, [[0, 1, 2]]), identity(4), divergence=divergence)
    expected = ctkd(logits, targets_of(teacher, [[0, 2]]), identity(4), divergence=divergence)
    torch.testing.assert_close(found.per_token, expected.per_token)
    found.per_token.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@both
@dtypes
@given(seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_half_precision_logits_are_within_a_hundredth(
    divergence: Divergence, dtype: torch.dtype, seed: int
) -> None:
    problem = random_problem(seed)
    rounded = torch.tanh(problem.logits).mul(8).to(dtype)
    exact = Problem(rounded.double(), problem.targets, problem.weights, problem.real)
    coarse = Problem(rounded, problem.targets, problem.weights, problem.real)
    expected = exact.loss(divergence).per_token
    found = coarse.loss(divergence).per_token
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-3)


@both
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("places", [0, 2])
@dtypes
def test_empty_input_costs_nothing_and_keeps_its_graph(
    divergence: Divergence, tokens: int, k: int, places: int, dtype: torch.dtype
) -> None:
    places = min(places, tokens)
    logits = torch.randn(tokens, 4).to(dtype).requires_grad_()
    found = ctkd(logits, nothing(places, k), identity(4), divergence=divergence)
    assert found.per_token.shape == (tokens,)
    assert found.per_token.requires_grad
    assert (found.per_token.abs() <= 1e-12).all()
    assert {len(mass) for mass in found.measured.values()} == {places}
    found.per_token.sum().backward()
    assert logits.grad is not None
    assert (logits.grad == 0).all()


@both
def test_a_batch_where_nothing_aligns_costs_nothing_and_has_a_graph(divergence: Divergence) -> None:
    student, teacher = sequence([b"abc", b"d"]), sequence([b"uvw", b"x", b"y"])
    topk = TopKLogprobs(
        ids=np.tile([0, 1], (3, 1)),
        logprobs=np.log(np.tile([0.5, 0.3], (3, 1))),
        token_logprobs=np.log(np.full(3, 0.5)),
        tail_logprobs=np.log(np.full(3, 0.2)),
    )
    targets = topk_targets(align(student, teacher), topk)
    assert targets.slots.shape == (0,)
    assert targets.ids.shape == (0, 2)
    weight = torch.randn(5, 4, requires_grad=True)
    found = ctkd(torch.ones(2, 5) @ weight, targets, identity(4), divergence=divergence)
    assert found.per_token.tolist() == [0, 0]
    found.per_token.sum().backward()
    assert weight.grad is not None
    assert (weight.grad == 0).all()


@both
def test_a_teacher_that_names_only_what_the_student_cannot_say_costs_nothing(
    divergence: Divergence,
) -> None:
    weights = np.array([[1.0, 0], [1.0, 0]])
    projection = device_projection(weights, np.ones(2, dtype=np.bool_))
    logits = torch.randn(1, 2, requires_grad=True)
    targets = targets_of(np.array([[0.3, 0.7]]), [[1]])
    found = ctkd(logits, targets, projection, divergence=divergence)
    assert found.per_token.item() == pytest.approx(0, abs=1e-6)
    assert found.measured["unsupported_mass"].item() == pytest.approx(0.7)
    assert found.measured["teacher_mass"].item() == pytest.approx(0, abs=1e-6)
    found.per_token.sum().backward()
    assert logits.grad is not None
    assert (logits.grad == 0).all()


@both
def test_a_row_in_which_a_teacher_says_nothing_at_all_is_not_nan(divergence: Divergence) -> None:
    targets = TopKTargets(
        torch.tensor([0, 1]),
        torch.tensor([[-1], [0]]),
        torch.tensor([[-torch.inf], [math.log(0.5)]]),
        torch.tensor([-torch.inf, math.log(0.5)]),
    )
    logits = torch.randn(2, 4, requires_grad=True)
    found = ctkd(logits, targets, identity(4), divergence=divergence)
    found.per_token.sum().backward()
    assert found.per_token[0].item() == 0
    assert found.per_token.isfinite().all()
    assert logits.grad is not None
    assert (logits.grad[0] == 0).all()
    assert logits.grad.isfinite().all()


@both
@given(st.integers(0, 2**32), st.floats(-1e-2, 1e-2))
@settings(deadline=None, max_examples=40)
def test_a_teacher_whose_masses_do_not_quite_sum_to_one_is_scaled(
    divergence: Divergence, seed: int, excess: float
) -> None:
    problem = random_problem(seed)
    targets = problem.targets
    scaled = TopKTargets(
        targets.slots, targets.ids, targets.logprobs + excess, targets.tail_logprobs + excess
    )
    found = Problem(problem.logits, scaled, problem.weights, problem.real).loss(divergence)
    torch.testing.assert_close(found.per_token, problem.loss(divergence).per_token)


@both
def test_the_loss_stands_at_its_slot_and_nowhere_else(divergence: Divergence) -> None:
    teacher = np.array([[0.6, 0.25, 0.1, 0.05]] * 2)
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    targets = targets_of(teacher, [[0, 1]] * 2, slots=[1, 4])
    found = ctkd(logits, targets, identity(4), divergence=divergence).per_token
    assert found.detach().nonzero().flatten().tolist() == [1, 4]
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum(dim=1).nonzero().flatten().tolist() == [1, 4]


@pytest.mark.parametrize("width", [3, 5])
def test_logits_of_another_width_are_refused(width: int) -> None:
    rows = DenseRows(torch.zeros(1, width), torch.ones(width, dtype=torch.bool))
    with pytest.raises(DataError, match=f"logits of width {width} for a projection of 4 rows"):
        ctkd_on_rows(rows, nothing(1, 1), identity(4))


def test_reverse_kl_is_bounded_by_the_floor_of_the_teachers_tail() -> None:
    logits = torch.tensor([[-1e4, 1e4]], dtype=torch.float64, requires_grad=True)
    found = ctkd(
        logits, targets_of(np.array([[1.0, 0.0]]), [[0]]), identity(2), divergence="reverse_kl"
    )
    assert found.per_token.item() == pytest.approx(-math.log(1e-4))
