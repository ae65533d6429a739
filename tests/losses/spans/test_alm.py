"""ALM: the published numbers, its limit, and when it is zero."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.core.span_targets import SpanTargets
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.spans.alm import AlmLoss
from tests.losses.contract import exact_spans
from tests.losses.problems import random_problem
from tests.reference.alm import alm as slow_alm
from tests.reference.dual import Dual
from tests.reference.span_view import SpanView, TeacherRow

seeds = st.integers(0, 2**32)


def one_span(
    student: list[float], teacher: list[float]
) -> tuple[torch.Tensor, DenseRows, SpanTargets]:
    """Tokens of given surprisals, in nats; token 0 is always the observed one."""
    rows = [[-s, np.log1p(-np.exp(-s))] for s in student]
    empty = torch.zeros(len(teacher), 0)
    targets = SpanTargets(
        student_starts=torch.tensor([0]),
        student_ends=torch.tensor([len(student)]),
        teacher_starts=torch.tensor([0]),
        teacher_ends=torch.tensor([len(teacher)]),
        span_bytes=torch.tensor([1]),
        labels=torch.zeros(len(student), dtype=torch.int64),
        sampled_logprobs=torch.zeros(len(student)),
        teacher_ids=torch.zeros(len(teacher), dtype=torch.int64),
        token_logprobs=-torch.tensor(teacher, dtype=torch.float64),
        topk_ids=empty.long(),
        topk_logprobs=empty,
        tail_logprobs=empty.sum(dim=1),
    )
    logits = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    return logits, DenseRows(logits, torch.ones(2, dtype=torch.bool)), targets


def value(student: list[float], teacher: list[float], tau: float | None, kind: str = "kl") -> float:
    _, rows, targets = one_span(student, teacher)
    return AlmLoss(kind, tau)(rows, targets).per_token[0].item()  # type: ignore[arg-type]


def test_the_published_numbers() -> None:
    assert value([1.0, 2.0], [0.5, 1.5], None) == pytest.approx(0.189070, abs=5e-7)
    assert value([3.0], [2.0], 1e4) * 1e4 == pytest.approx(0.189051, abs=5e-7)


def test_the_reference_gives_the_published_numbers_too() -> None:
    view = SpanView(
        student=[[Dual(np.exp(-3.0))]],
        labels=[0],
        teacher=[TeacherRow({}, 1.0, 0, float(np.exp(-2.0)))],
        next_student=None,
        next_teacher=None,
    )
    assert slow_alm(view, "kl", None).value == pytest.approx(0.189070, abs=5e-7)
    assert slow_alm(view, "kl", 1e4).value * 1e4 == pytest.approx(0.189051, abs=5e-7)


@pytest.mark.parametrize("kind", ["kl", "tvd"])
@given(
    student=st.lists(st.floats(0.01, 8), min_size=1, max_size=3),
    teacher=st.lists(st.floats(0.01, 8), min_size=1, max_size=3),
)
@settings(deadline=None, max_examples=30)
def test_the_limit_is_tau_times_the_value_at_a_large_tau(
    kind: str, student: list[float], teacher: list[float]
) -> None:
    limit = value(student, teacher, None, kind)
    assert value(student, teacher, 1e6, kind) * 1e6 == pytest.approx(limit, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("tau", [None, 5.0])
@given(alpha=st.floats(0.1, 8), beta=st.floats(0.1, 8))
@settings(deadline=None, max_examples=30)
def test_the_gradient_is_zero_exactly_where_the_likelihoods_agree(
    tau: float | None, alpha: float, beta: float
) -> None:
    for student, agrees in (([alpha / 2, alpha / 2], True), ([beta], abs(alpha - beta) < 1e-6)):
        logits, rows, targets = one_span(student, [alpha / 4, 3 * alpha / 4])
        (gradient,) = torch.autograd.grad(AlmLoss(tau=tau)(rows, targets).per_token.sum(), logits)
        if agrees:
            assert gradient.abs().max() < 1e-6
        else:
            assert gradient.abs().max() > 0


def test_every_position_of_a_span_gets_the_same_gradient_coefficient() -> None:
    logits, rows, targets = one_span([1.0, 2.0], [2.0])
    (gradient,) = torch.autograd.grad(AlmLoss()(rows, targets).per_token.sum(), logits)
    p = logits.detach().softmax(dim=1)
    expected = (1 - 2.0 / 3.0) * (p - torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(gradient, expected)


def test_a_certain_teacher_or_student_is_clamped_at_the_floor() -> None:
    for student, teacher in (([1e-9], [2.0]), ([2.0], [0.0]), ([1e-9], [0.0])):
        logits, rows, targets = one_span(student, teacher)
        output = AlmLoss()(rows, targets)
        expected = max(student[0], 1e-4), max(teacher[0], 1e-4)
        beta, alpha = expected
        exact = beta - alpha + alpha * np.log(alpha / beta)
        assert output.per_token[0].item() == pytest.approx(exact)
        (gradient,) = torch.autograd.grad(output.per_token.sum(), logits)
        assert gradient.isfinite().all()


@given(seed=seeds)
@settings(deadline=None, max_examples=20)
def test_a_span_that_the_teacher_rules_out_is_not_compared(seed: int) -> None:
    problem = random_problem(seed)
    spans = exact_spans(problem)
    ruled_out = replace(spans, token_logprobs=spans.token_logprobs.clone().fill_(-torch.inf))
    problem.logits.requires_grad_()
    output = AlmLoss()(problem.rows(), ruled_out)
    assert (output.per_token == 0).all()
    assert {len(column) for column in output.measured.values()} == {0}
    (gradient,) = torch.autograd.grad(output.per_token.sum(), problem.logits)
    assert (gradient == 0).all()
