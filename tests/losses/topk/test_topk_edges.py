"""Edge cases of top-k losses: missing rows, unsupported ids, rounding, temperatures, masses."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.config import Direction, TopKDivergenceSettings
from mopd_losses.topk.topk_targets import TopKTargets
from tests.losses.measures import TRUNCATED, name_of
from tests.losses.topk_problems import (
    DIVERGENCES,
    Problem,
    device_projection,
    random_problem,
    targets_of,
    topk_loss,
)
from tests.reference.topk_divergence import project, softmax

seeds = st.integers(0, 2**32)
both = pytest.mark.parametrize("divergence", DIVERGENCES)
every_form = pytest.mark.parametrize("chosen", TRUNCATED, ids=name_of)

#: Teachers and students without doubt, about the same and about other ids.
ONE_HOT = np.array([[1.0, 0, 0, 0], [0, 0, 0, 1], [0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25]])


@every_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_hot_teachers_and_students_give_finite_values_and_masses(
    chosen: TopKDivergenceSettings, dtype: torch.dtype
) -> None:
    for kept in ([], [0, 1], [0, 1, 2, 3]):
        targets = targets_of(ONE_HOT, [[i for i in kept if row[i] > 0] for row in ONE_HOT])
        for size in (1e4, -1e4):
            logits = torch.zeros(4, 4, dtype=dtype)
            logits[:, 1] = size
            logits.requires_grad_()
            output = topk_loss(logits, targets, chosen)
            output.per_token.sum().backward()
            assert output.per_token.isfinite().all()
            assert logits.grad is not None
            assert logits.grad.isfinite().all()
            for name, mass in output.measured.items():
                assert ((mass >= -1e-6) & (mass <= 1 + 1e-6)).all(), name


@both
def test_ids_without_a_student_token_have_no_loss(divergence: Direction) -> None:
    projection = device_projection(np.array([[1.0, 0], [1.0, 0]]), np.ones(2, dtype=np.bool_))
    logits = torch.randn(1, 2, requires_grad=True)
    chosen = TopKDivergenceSettings(divergence=divergence)
    output = topk_loss(logits, targets_of(np.array([[0.3, 0.7]]), [[1]]), chosen, projection)
    assert output.per_token.item() == pytest.approx(0, abs=1e-6)
    assert output.measured["unsupported_mass"].item() == pytest.approx(0.7)
    assert output.measured["teacher_mass"].item() == pytest.approx(0, abs=1e-6)
    output.per_token.sum().backward()
    assert logits.grad is not None
    assert (logits.grad == 0).all()


@every_form
def test_an_empty_teacher_row_has_no_loss(chosen: TopKDivergenceSettings) -> None:
    targets = TopKTargets(
        torch.tensor([0, 1]),
        torch.tensor([[-1], [0]]),
        torch.tensor([[-torch.inf], [math.log(0.5)]]),
        torch.tensor([-torch.inf, math.log(0.5)]),
    )
    logits = torch.randn(2, 4, requires_grad=True)
    output = topk_loss(logits, targets, chosen)
    output.per_token.sum().backward()
    assert output.per_token[0].item() == 0
    assert output.per_token.isfinite().all()
    assert logits.grad is not None
    assert (logits.grad[0] == 0).all()
    assert logits.grad.isfinite().all()


@every_form
def test_missing_entries_and_their_order_change_nothing(chosen: TopKDivergenceSettings) -> None:
    for seed in range(5):
        problem = random_problem(seed)
        targets = problem.targets
        entries = torch.tensor(np.random.default_rng(seed).permutation(targets.ids.shape[1]))
        missing = (len(targets.positions), 2)
        widened = TopKTargets(
            targets.positions,
            torch.cat([torch.full(missing, -1), targets.ids[:, entries]], dim=1),
            torch.cat([torch.full(missing, -torch.inf), targets.logprobs[:, entries]], dim=1),
            targets.tail_logprobs,
        )
        wide = Problem(problem.logits, widened, problem.weights, problem.real)
        torch.testing.assert_close(wide.loss(chosen).per_token, problem.loss(chosen).per_token)


@both
@given(seeds, st.floats(-1e-2, 1e-2))
@settings(deadline=None, max_examples=10)
def test_teacher_masses_that_do_not_quite_sum_to_one_are_scaled(
    divergence: Direction, seed: int, excess: float
) -> None:
    problem, chosen = random_problem(seed), TopKDivergenceSettings(divergence=divergence)
    targets = problem.targets
    scaled = TopKTargets(
        targets.positions, targets.ids, targets.logprobs + excess, targets.tail_logprobs + excess
    )
    output = Problem(problem.logits, scaled, problem.weights, problem.real).loss(chosen)
    torch.testing.assert_close(output.per_token, problem.loss(chosen).per_token)


@both
def test_a_constant_added_in_float32_changes_nothing_at_a_small_tail(divergence: Direction) -> None:
    draw = np.random.default_rng(0)
    logits = torch.tensor(draw.normal(size=(50, 20)) * 4).bfloat16().float()
    logits[:, 0] += 16  # nearly certain, so that the tail is a small difference
    teacher = 0.5 * logits.softmax(dim=1).double().numpy() + 0.5 * draw.dirichlet(np.ones(20), 50)
    targets = targets_of(teacher, [[0, 1, 2]] * 50)
    chosen = TopKDivergenceSettings(divergence=divergence)
    plain, shifted = (topk_loss(logits + shift, targets, chosen).per_token for shift in (0, 128))
    assert torch.equal(plain, shifted)
    exact = topk_loss(logits.double(), targets, chosen).per_token
    torch.testing.assert_close(plain.double(), exact, rtol=1e-2, atol=1e-3)


@both
def test_twenty_thousand_random_pairs_are_between_zero_and_the_full_divergence(
    divergence: Direction,
) -> None:
    draw = np.random.default_rng(0)
    teacher = draw.dirichlet(np.full(6, 0.7), size=20_000)
    student = torch.tensor(draw.dirichlet(np.full(6, 0.7), size=20_000)).clamp_min(1e-300)
    targets = TopKTargets(
        torch.arange(20_000),
        torch.tensor([[0, 1, 2]]).repeat(20_000, 1),
        torch.tensor(teacher[:, :3]).log(),
        torch.tensor(teacher[:, 3:].sum(axis=1)).log(),
    )
    chosen = TopKDivergenceSettings(divergence=divergence)
    values = topk_loss(student.log(), targets, chosen).per_token
    assert values.min() >= (-1e-12 if divergence == "forward_kl" else -1e-4)
    log_ratios = torch.tensor(teacher).log() - student.log()
    full = torch.tensor(teacher) * log_ratios
    if divergence == "reverse_kl":
        full = -student * log_ratios
    unfloored = torch.tensor(teacher[:, 3:].sum(axis=1) >= 1e-4)
    assert (values <= full.nan_to_num().sum(dim=1) + 2e-5)[unfloored].all()


@both
@pytest.mark.parametrize("temperature", [0.5, 2.0, 10.0])
def test_a_temperature_divides_the_logits_and_squares_the_value(
    divergence: Direction, temperature: float
) -> None:
    draw = np.random.default_rng(1)
    logits = torch.tensor(draw.normal(size=(2, 6)) * 3, requires_grad=True)
    teacher = torch.tensor(draw.normal(size=(2, 6)) * 3).div(temperature).softmax(dim=1)
    targets = targets_of(teacher.numpy(), [[0, 1, 2, 3, 4]] * 2)
    chosen = TopKDivergenceSettings(divergence=divergence)
    values = topk_loss(logits, targets, chosen, teacher_temperature=temperature).per_token
    log_p, log_t = (logits / temperature).log_softmax(dim=1), teacher.log()
    a, b = (log_t, log_p) if divergence == "forward_kl" else (log_p, log_t)
    expected = temperature**2 * (a.exp() * (a - b)).sum(dim=1)
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-9)
    (gradient,) = torch.autograd.grad(values.sum(), logits, retain_graph=True)
    (slopes,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(gradient, slopes, rtol=1e-8, atol=1e-8)


def test_several_tokens_of_one_id_share_its_gradient_in_proportion() -> None:
    weights = np.array([[1.0, 0], [1.0, 0], [0, 1.0]])
    projection = device_projection(weights, np.ones(3, dtype=np.bool_))
    logits = torch.tensor([[0.1, 0.3, 0.6]], dtype=torch.float64).log().requires_grad_()
    targets = targets_of(np.array([[0.8, 0.2]]), [[0]])
    topk_loss(logits, targets, projection=projection).per_token.sum().backward()
    assert logits.grad is not None
    # Q - t on the bucket, split 1 : 3 between the two; the rest is one token.
    np.testing.assert_allclose(logits.grad[0].numpy(), [-0.1, -0.3, 0.4], atol=1e-12)


@given(seeds, st.sampled_from([0.5, 1.0, 3.0]))
@settings(deadline=None, max_examples=20)
def test_measured_masses_equal_slow_sums(seed: int, temperature: float) -> None:
    problem = random_problem(seed)
    measured = problem.loss(TopKDivergenceSettings(), temperature).measured
    targets, weights = problem.targets, problem.weights
    supported = (weights[problem.real] > 0).any(axis=0)
    expected: dict[str, list[float]] = {name: [] for name in measured}
    for position, ids, logprobs in zip(
        targets.positions.tolist(), targets.ids.tolist(), targets.logprobs.tolist(), strict=True
    ):
        p = softmax(problem.logits[position].tolist(), problem.real.tolist(), temperature)
        q = project(p, weights.tolist())
        sent = {i: math.exp(lp) for i, lp in zip(ids, logprobs, strict=True) if i >= 0}
        expected["teacher_mass"].append(sum(t for i, t in sent.items() if supported[i]))
        expected["student_mass"].append(sum(q[i] for i in sent if supported[i]))
        expected["unsupported_mass"].append(sum(t for i, t in sent.items() if not supported[i]))
        unprojected = [a for a, row in zip(p, weights, strict=True) if not row.any()]
        expected["unprojected_mass"].append(sum(unprojected))
    for name, masses in measured.items():
        # The retained mass is clamped to at most 1 minus 1e-6.
        np.testing.assert_allclose(masses.numpy(), expected[name], atol=1.1e-6, err_msg=name)
        assert not masses.requires_grad
