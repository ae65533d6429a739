"""P-KL to the letter: the published numbers, and the faults that are documented."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.xtoken import PklParityLoss, SupportTargets, teacher_means, topk_support
from mopd_losses.core.student_rows import DenseRows
from tests.losses.contract import exact_spans
from tests.losses.problems import Problem, random_problem, scattered, teacher_row, views
from tests.losses.spans.test_gold import all_rows, span_pairs
from tests.losses.topk_problems import DIVERGENCES, device_projection, identity
from tests.reference import xtoken
from tests.reference.dual import Dual
from tests.reference.span_view import TeacherRow

seeds = st.integers(0, 2**32)
both = pytest.mark.parametrize("divergence", DIVERGENCES)

WEIGHTS = np.array([[1, 0, 0, 0], [0, 1 / 1.1, 0.1 / 1.1, 0], [0, 0, 0, 1]])
STUDENT = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64)
TEACHER = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.2, 0.6]], dtype=torch.float64)
GOLDEN = {"forward_kl": -0.191750, "reverse_kl": 0.267548}


def on(support: list[int], teacher: Tensor, spans: list[tuple[int, int]]) -> SupportTargets:
    """Spans that are the same on both sides."""
    pairs = span_pairs(spans, spans)
    bounds = (pairs.student_starts, pairs.student_ends, pairs.teacher_starts, pairs.teacher_ends)
    return SupportTargets(*bounds, torch.tensor(support), teacher.log()[:, support])


def teacher_rows(problem: Problem) -> list[TeacherRow]:
    return [
        teacher_row(comparison, row)
        for comparison in problem.comparisons
        for row in range(len(comparison.score.completion))
    ]


def support_of(problem: Problem) -> list[int]:
    """Return every id that any row of the micro-batch sent."""
    return sorted({j for row in teacher_rows(problem) for j in row.kept})


def on_support(problem: Problem, rows: list[TeacherRow]) -> list[list[float]]:
    """Spread each row's tail over the ids of the support that the row did not send."""
    support = support_of(problem)
    return [xtoken.filled(row, support, problem.teacher_size) for row in rows]


@pytest.mark.parametrize(("divergence", "temperature"), [("forward_kl", 1.0), ("reverse_kl", 2.0)])
@given(seed=seeds)
@settings(deadline=None, max_examples=8)
def test_value_and_gradient_equal_the_reference(
    divergence: Any, temperature: float, seed: int
) -> None:
    problem = random_problem(seed)
    logits = problem.logits.clone().requires_grad_()
    loss = PklParityLoss(problem.projection(), divergence, temperature)
    targets = topk_support(exact_spans(problem), problem.teacher_size)
    values = loss(problem.with_logits(logits).rows(), targets).per_token
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    support, weights = support_of(problem), problem.weights.tolist()
    forward = divergence == "forward_kl"
    expected, slopes = scattered(
        problem,
        [
            (at, xtoken.pkl(view.student, weights, rows, support, forward, temperature))
            for at, view in views(problem, temperature)
            for rows in [on_support(problem, view.teacher)]
        ],
    )
    np.testing.assert_allclose(values.detach().numpy(), expected, atol=1e-8)
    np.testing.assert_allclose(gradient.numpy(), slopes, atol=1e-6)


@both
def test_pkl_gives_the_published_numbers(divergence: str) -> None:
    targets = on([0, 1, 3], TEACHER, [(0, 2)])
    projection = device_projection(WEIGHTS, np.ones(3, dtype=np.bool_))
    rows = DenseRows(STUDENT.log(), all_rows(3))
    output = PklParityLoss(projection, divergence)(rows, targets)  # type: ignore[arg-type]
    assert output.per_token.tolist() == pytest.approx([GOLDEN[divergence], 0], abs=5e-7)
    mass = teacher_means(targets, torch.float64).exp().sum()
    assert mass.item() == pytest.approx(0.772693, abs=5e-7)


@both
def test_the_reference_gives_the_published_numbers_too(divergence: str) -> None:
    compared = xtoken.pkl(
        [[Dual(p) for p in row] for row in STUDENT.tolist()],
        WEIGHTS.tolist(),
        TEACHER[:, [0, 1, 3]].tolist(),
        [0, 1, 3],
        divergence == "forward_kl",
        1.0,
    )
    assert compared.value == pytest.approx(GOLDEN[divergence], abs=5e-7)


@both
def test_pkl_of_one_model_is_zero_in_single_tokens_and_not_in_longer_spans(divergence: str) -> None:
    logits = torch.tensor(np.random.default_rng(0).normal(size=(4, 5)), requires_grad=True)

    def cost(spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        targets = on([0, 1, 2, 3, 4], logits.detach().softmax(dim=1), spans)
        rows = DenseRows(logits, all_rows(5))
        output = PklParityLoss(identity(5), divergence)(rows, targets)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(output.per_token.sum(), logits)
        return output.per_token.detach(), gradient

    value, gradient = cost([(0, 1), (1, 2), (2, 3), (3, 4)])
    assert value.abs().max() < 1e-8
    assert gradient.abs().max() < 1e-8
    value, gradient = cost([(0, 2), (2, 4)])
    assert (
        (value[[0, 2]] < -1e-2).all() if divergence == "forward_kl" else value[[0, 2]].min() > 1e-2
    )
    assert gradient.abs().max() > 1e-2


def test_pkl_pays_a_constant_for_ids_that_no_student_id_reaches() -> None:
    weights = np.array([[1.0, 0, 0], [0, 1, 0]])
    projection = device_projection(weights, np.ones(2, dtype=np.bool_))
    teacher = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    rows = DenseRows(torch.tensor([[0.5, 0.3]], dtype=torch.float64).log(), all_rows(2))
    loss = PklParityLoss(projection)(rows, on([0, 1, 2], teacher, [(0, 1)])).per_token.item()
    rest = 0.5 * np.log(0.5 / 0.625) + 0.3 * np.log(0.3 / 0.375)
    assert loss == pytest.approx(0.2 * np.log(0.2 / 1e-10) + rest, abs=1e-6)
    assert loss > 4


def test_another_completion_in_the_micro_batch_changes_pkl() -> None:
    changed = 0
    for seed in range(20):
        problem = random_problem(seed, completions=2)
        first_only = problem.comparisons[:1], problem.offsets[:1]
        both_of_them = topk_support(exact_spans(problem), problem.teacher_size)
        first = topk_support(
            exact_spans(replace(problem, comparisons=first_only[0], offsets=first_only[1])),
            problem.teacher_size,
        )
        actual, expected = (
            PklParityLoss(problem.projection())(problem.rows(), targets).per_token
            for targets in (both_of_them.between(0, problem.offsets[1]), first)
        )
        positions = slice(0, problem.offsets[1])
        changed += not torch.allclose(actual[positions], expected[positions])
    assert changed > 3


@given(seed=seeds)
@settings(deadline=None, max_examples=30)
def test_ids_that_a_row_did_not_send_share_its_tail(seed: int) -> None:
    problem = random_problem(seed)
    targets = topk_support(exact_spans(problem), problem.teacher_size)
    expected = np.array(on_support(problem, teacher_rows(problem))).reshape(targets.logprobs.shape)
    np.testing.assert_allclose(targets.logprobs.exp().numpy(), expected, rtol=1e-9)


@given(seed=seeds, most_ids=st.integers(1, 5))
@settings(deadline=None, max_examples=30)
def test_a_support_that_is_too_large_keeps_the_ids_that_are_likeliest_in_any_row(
    seed: int, most_ids: int
) -> None:
    problem = random_problem(seed)
    spans = exact_spans(problem)
    every = topk_support(spans, problem.teacher_size)
    cut = topk_support(spans, problem.teacher_size, most_ids=most_ids)
    sent: dict[int, float] = {}
    for ids, logprobs in zip(spans.topk_ids.tolist(), spans.topk_logprobs.tolist(), strict=True):
        for token, logprob in zip(ids, logprobs, strict=True):
            if token >= 0:
                sent[token] = max(sent.get(token, -np.inf), logprob)
    likeliest = sorted(sorted(sent, key=lambda token: -sent[token])[:most_ids])
    assert cut.support.tolist() == likeliest
    columns = [every.support.tolist().index(token) for token in likeliest]
    assert torch.equal(cut.logprobs, every.logprobs[:, columns])
    loss = PklParityLoss(problem.projection(), most_ids=most_ids)
    own = loss.targets(problem.comparisons, problem.offsets)
    assert own.support.tolist() == likeliest
