"""Losses on sampled tokens: expected gradients by exact enumeration, and which tokens they read."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopd_losses.core.loss import LossOutput
from mopd_losses.core.span_targets import SpanTargets, span_targets
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.divergences.divergences import forward_kl, reverse_kl
from mopd_losses.sampled.k2_k3 import K2Loss, K3Loss, k2, k3
from mopd_losses.sampled.policy_gradient import PolicyGradientLoss
from tests.losses.scored_completions import STUDENT_SIZE, several

seeds = st.integers(0, 2**32)
each = pytest.mark.parametrize(
    "loss",
    [
        PolicyGradientLoss(),
        PolicyGradientLoss(has_baseline=True),
        PolicyGradientLoss(skew=0.3),
        K2Loss(),
        K3Loss(),
    ],
)


def every_token(teacher: Tensor, sampled: Tensor) -> SpanTargets:
    """One position for every token that could have been drawn, at one place of a text."""
    tokens = torch.arange(len(teacher))
    return SpanTargets(
        student_starts=tokens,
        student_ends=tokens + 1,
        teacher_starts=tokens,
        teacher_ends=tokens + 1,
        span_bytes=torch.ones_like(tokens),
        labels=tokens,
        sampled_logprobs=sampled,
        teacher_ids=tokens,
        token_logprobs=teacher,
        topk_ids=tokens[:, None],
        topk_logprobs=teacher[:, None],
        tail_logprobs=torch.zeros_like(teacher),
    )


def three_distributions(seed: int, size: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Student logits; log-probabilities of the teacher and of what was sampled from."""
    draw = np.random.default_rng(seed)
    logits, teacher, sampled = torch.tensor(draw.normal(size=(3, size)) * 1.5)
    return logits.requires_grad_(), teacher.log_softmax(0), sampled.log_softmax(0)


def expected(
    loss: Callable[[DenseRows, SpanTargets], LossOutput],
    logits: Tensor,
    teacher: Tensor,
    sampled: Tensor,
) -> tuple[float, Tensor]:
    """Value and gradient of a loss, averaged exactly over all tokens that can be drawn."""
    rows = DenseRows(logits.repeat(len(logits), 1), torch.ones(len(logits), dtype=torch.bool))
    output = loss(rows, every_token(teacher, sampled))
    mean = (output.per_token * sampled.exp()).sum()
    return mean.item(), torch.autograd.grad(mean, logits)[0]


def gradient_of(
    divergence: Callable[[Tensor, Tensor], Tensor], logits: Tensor, teacher: Tensor
) -> tuple[float, Tensor]:
    value = divergence(logits.log_softmax(0)[None], teacher[None])[0]
    return value.item(), torch.autograd.grad(value, logits)[0]


def test_the_estimates_give_the_published_numbers() -> None:
    d = torch.tensor(math.log(0.2 / 0.5), dtype=torch.float64)
    assert d.item() == pytest.approx(-0.916291, abs=5e-7)
    assert k2(d).item() == pytest.approx(0.419794, abs=5e-7)
    assert k3(d).item() == pytest.approx(0.583709, abs=5e-7)


@given(seeds)
@settings(deadline=None, max_examples=25)
def test_on_fresh_samples_k2_has_the_gradient_of_reverse_kl(seed: int) -> None:
    logits, teacher, _ = three_distributions(seed)
    _, gradient = expected(K2Loss(), logits, teacher, logits.detach().log_softmax(0))
    torch.testing.assert_close(gradient, gradient_of(reverse_kl, logits, teacher)[1])


@given(seeds)
@settings(deadline=None, max_examples=25)
def test_on_fresh_samples_k3_has_the_value_of_reverse_and_the_gradient_of_forward_kl(
    seed: int,
) -> None:
    logits, teacher, _ = three_distributions(seed)
    value, gradient = expected(K3Loss(), logits, teacher, logits.detach().log_softmax(0))
    assert value == pytest.approx(gradient_of(reverse_kl, logits, teacher)[0])
    torch.testing.assert_close(gradient, gradient_of(forward_kl, logits, teacher)[1])


@given(seeds)
@settings(deadline=None, max_examples=10)
def test_k1_and_any_baseline_have_no_gradient_in_expectation(seed: int) -> None:
    logits, teacher, _ = three_distributions(seed)
    student = logits.log_softmax(0)
    for loss in (student - teacher, 3.7 * student):
        mean = (student.detach().exp() * loss).sum()
        (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
        np.testing.assert_allclose(gradient.numpy(), 0, atol=1e-14)


@given(seeds)
@settings(deadline=None, max_examples=25)
def test_the_policy_gradient_is_that_of_reverse_kl_for_any_sampling_policy(seed: int) -> None:
    logits, teacher, sampled = three_distributions(seed)
    loss = PolicyGradientLoss(max_ratio=1e9)
    for drawn_from in (sampled, logits.detach().log_softmax(0)):
        value, gradient = expected(loss, logits, teacher, drawn_from)
        expected_value, expected_gradient = gradient_of(reverse_kl, logits, teacher)
        assert value == pytest.approx(expected_value)
        torch.testing.assert_close(gradient, expected_gradient)


@given(seeds, st.floats(0.01, 0.99), st.booleans())
@settings(deadline=None, max_examples=25)
def test_the_gradient_with_a_proximal_teacher_is_that_of_reverse_kl_to_the_mixture(
    seed: int, skew: float, has_baseline: bool
) -> None:
    logits, teacher, sampled = three_distributions(seed)
    mixture = (skew * logits.detach().softmax(0) + (1 - skew) * teacher.exp()).log()
    expected_value, expected_gradient = gradient_of(reverse_kl, logits, mixture)
    rows = DenseRows(logits.repeat(6, 1), torch.ones(6, dtype=torch.bool))
    targets = with_top_k(teacher, sampled, 4)
    values = PolicyGradientLoss(1e9, has_baseline, skew)(rows, targets).per_token
    mean = (values * sampled.exp()).sum()
    assert mean.item() == pytest.approx(expected_value)
    (gradient,) = torch.autograd.grad(mean, logits)
    torch.testing.assert_close(gradient, expected_gradient)


def test_a_proximal_teacher_bounds_the_weight_of_what_the_teacher_excludes() -> None:
    logits = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    sampled = logits.detach().log_softmax(0)
    teacher = torch.tensor([0.0, *[-40.0] * 5], dtype=torch.float64)
    rows = DenseRows(logits.repeat(6, 1), torch.ones(6, dtype=torch.bool))
    values = PolicyGradientLoss(skew=0.25)(rows, every_token(teacher, sampled)).per_token
    assert values[1:].tolist() == pytest.approx([math.log(4)] * 5)
    assert values[0].item() == pytest.approx(-math.log(0.25 + 0.75 * 6))


def with_top_k(teacher: Tensor, sampled: Tensor, k: int) -> SpanTargets:
    """``every_token`` with the teacher's ``k`` most likely ids in each row."""
    logprobs, ids = teacher.topk(k)
    rest = (1 - logprobs.exp().sum()).clamp_min(1e-12).log()
    return replace(
        every_token(teacher, sampled),
        topk_ids=ids.expand(len(teacher), -1),
        topk_logprobs=logprobs.expand(len(teacher), -1),
        tail_logprobs=rest.expand(len(teacher)),
    )


@given(seeds, st.integers(1, 6))
@settings(deadline=None, max_examples=25)
def test_a_baseline_of_any_top_k_leaves_value_and_expected_gradient(seed: int, k: int) -> None:
    logits, teacher, sampled = three_distributions(seed)
    rows = DenseRows(logits.repeat(6, 1), torch.ones(6, dtype=torch.bool))
    expected_value, expected_gradient = gradient_of(reverse_kl, logits, teacher)
    for drawn_from in (sampled, logits.detach().log_softmax(0)):
        targets = with_top_k(teacher, drawn_from, k)
        plain, corrected = (
            PolicyGradientLoss(1e9, has_baseline)(rows, targets).per_token
            for has_baseline in (False, True)
        )
        torch.testing.assert_close(plain, corrected)
        mean = (corrected * drawn_from.exp()).sum()
        assert mean.item() == pytest.approx(expected_value)
        (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
        torch.testing.assert_close(gradient, expected_gradient)


def gradient_variance(loss: PolicyGradientLoss, logits: Tensor, targets: SpanTargets) -> float:
    """The trace of the covariance of the gradient by the logits over fresh samples."""
    rows = DenseRows(logits.repeat(len(logits), 1), torch.ones(len(logits), dtype=torch.bool))
    values = loss(rows, targets).per_token
    gradients = torch.stack(
        [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in values]
    )
    p = logits.detach().softmax(0)
    mean = (p[:, None] * gradients).sum(dim=0)
    return float((p * (gradients - mean).square().sum(dim=1)).sum())


@pytest.mark.parametrize("k", [2, 6])
def test_a_baseline_lowers_the_variance_of_the_gradient(k: int) -> None:
    plain, corrected = [], []
    for seed in range(100):
        logits, teacher, _ = three_distributions(seed)
        targets = with_top_k(teacher, logits.detach().log_softmax(0), k)
        plain.append(gradient_variance(PolicyGradientLoss(), logits, targets))
        corrected.append(gradient_variance(PolicyGradientLoss(has_baseline=True), logits, targets))
    ratios = np.array(corrected) / np.array(plain)
    assert sum(corrected) < 0.75 * sum(plain)
    assert np.median(ratios) < 0.9
    if k == 6:  # of all baselines, the one with the least variance
        assert (ratios < 1).all()


@given(seeds)
@settings(deadline=None, max_examples=25)
def test_a_clipped_token_keeps_its_direction_with_the_largest_weight(seed: int) -> None:
    logits, teacher, sampled = three_distributions(seed)
    rows = DenseRows(logits.repeat(6, 1), torch.ones(6, dtype=torch.bool))
    output = PolicyGradientLoss(max_ratio=1.2)(rows, every_token(teacher, sampled))
    student = logits.detach().log_softmax(0)
    for token in range(6):
        ratio = math.exp(student[token] - sampled[token])
        weight = min(ratio, 1.2) * (student[token] - teacher[token]).item()
        assert output.per_token[token].item() == pytest.approx(weight)
        (gradient,) = torch.autograd.grad(output.per_token[token], logits, retain_graph=True)
        score = -student.exp()
        score[token] += 1
        np.testing.assert_allclose(gradient.numpy(), weight * score.numpy(), atol=1e-12)
        assert output.measured["importance_ratio"][token].item() == pytest.approx(ratio)
        assert output.measured["clipped"][token].item() == (ratio > 1.2)
        gap = (student[token] - teacher[token]).item()
        assert output.measured["log_ratio"][token].item() == pytest.approx(gap)
    assert not any(measured.requires_grad for measured in output.measured.values())


def test_k2_and_k3_are_never_negative_and_have_their_own_slopes() -> None:
    d = torch.linspace(-12, 12, 97, dtype=torch.float64, requires_grad=True)
    for estimate, slope in ((k2, d.detach()), (k3, 1 - (-d.detach()).exp())):
        value = estimate(d)
        assert (value >= 0).all()
        torch.testing.assert_close(torch.autograd.grad(value.sum(), d)[0], slope)
        assert torch.autograd.gradcheck(estimate, d)


def test_k2_and_k3_keep_their_slopes_in_the_precision_that_students_are_trained_in() -> None:
    d = torch.linspace(-12, 12, 97, requires_grad=True)
    exact = d.detach().double()
    for estimate, slope in ((k2, exact), (k3, -torch.expm1(-exact))):
        (gradient,) = torch.autograd.grad(estimate(d).sum(), d)
        torch.testing.assert_close(gradient.double(), slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_k3_continues_linearly_where_its_exponential_would_overflow(dtype: torch.dtype) -> None:
    d = torch.tensor([-20.0, -21.0, -1e4], dtype=dtype, requires_grad=True)
    value = k3(d)
    (slope,) = torch.autograd.grad(value.sum(), d)
    steepest = -math.expm1(20)
    assert slope[1:].tolist() == pytest.approx([steepest] * 2)
    assert value[0].item() == pytest.approx(math.expm1(20) - 20)
    assert (value[1] - value[0]).item() == pytest.approx(-steepest, rel=1e-5)
    assert value.isfinite().all()


@each
def test_a_token_that_either_side_rules_out_is_skipped_and_counted(
    loss: PolicyGradientLoss | K2Loss | K3Loss,
) -> None:
    logits, teacher, sampled = three_distributions(1)
    masked = logits.detach().clone()
    masked[2] = -torch.inf
    masked.requires_grad_()
    teacher[4] = -torch.inf
    rows = DenseRows(masked.repeat(6, 1), torch.ones(6, dtype=torch.bool))
    output = loss(rows, every_token(teacher, sampled))
    (gradient,) = torch.autograd.grad(output.per_token.sum(), masked)
    assert output.measured["ruled_out"].tolist() == [0, 0, 1, 0, 1, 0]
    assert output.measured["log_ratio"].shape == (4,)
    assert output.per_token[[2, 4]].tolist() == [0, 0]
    assert (output.per_token[[0, 1, 3, 5]] != 0).all()
    assert output.per_token.isfinite().all()
    assert gradient.isfinite().all()


@each
def test_nan_from_a_teacher_reaches_the_loss(loss: PolicyGradientLoss | K2Loss | K3Loss) -> None:
    logits, teacher, sampled = three_distributions(1)
    teacher[4] = torch.nan
    rows = DenseRows(logits.repeat(6, 1), torch.ones(6, dtype=torch.bool))
    assert loss(rows, every_token(teacher, sampled)).per_token.isnan().tolist() == [
        token == 4 for token in range(6)
    ]


@each
def test_each_span_is_compared_by_the_probabilities_of_its_text(
    loss: PolicyGradientLoss | K2Loss | K3Loss,
) -> None:
    comparisons, offsets, positions = several(seed=0)
    logits = torch.randn(positions, STUDENT_SIZE, generator=torch.Generator().manual_seed(0))
    rows = DenseRows(logits, torch.ones(STUDENT_SIZE, dtype=torch.bool))
    output = loss(rows, loss.targets(comparisons, offsets))
    student = logits.log_softmax(dim=1)
    own, teacher, sampled, compared = dict[int, float](), [], [], set[int]()
    for comparison, offset in zip(comparisons, offsets, strict=True):
        spans = comparison.alignment
        columns = spans.student_starts, spans.student_ends, spans.teacher_starts, spans.teacher_ends
        for start, end, first, last in zip(*(c.tolist() for c in columns), strict=True):
            labels = comparison.student.token_ids[start:end].tolist()
            own[offset + start] = sum(
                student[offset + start + at, label].item() for at, label in enumerate(labels)
            )
            teacher.append(float(comparison.score.topk.token_logprobs[first:last].sum()))
            assert comparison.sampled_logprobs is not None
            sampled.append(float(comparison.sampled_logprobs[start:end].sum()))
            compared.update(range(offset + start, offset + end))
    assert any(end - start > 1 for start, end in zip(own, [*own][1:], strict=False))
    assert output.per_token.nonzero().flatten().tolist() == list(own)
    assert output.compared.nonzero().flatten().tolist() == sorted(compared)
    log_ratios = [p - t for p, t in zip(own.values(), teacher, strict=True)]
    assert output.measured["log_ratio"].tolist() == pytest.approx(log_ratios, abs=1e-5)
    if isinstance(loss, PolicyGradientLoss):
        ratios = [math.exp(p - mu) for p, mu in zip(own.values(), sampled, strict=True)]
        assert output.measured["importance_ratio"].tolist() == pytest.approx(ratios, rel=1e-5)


def test_labels_are_at_their_positions_after_a_completion_of_another_teacher() -> None:
    comparisons, offsets, positions = several(seed=1)
    targets = span_targets(comparisons, offsets)
    first, second = comparisons
    assert targets.labels.tolist() == [
        *first.student.token_ids.tolist(),
        *[-1] * 3,
        *second.student.token_ids.tolist(),
    ]
    assert len(targets.labels) == positions
    np.testing.assert_array_equal(targets.sampled_logprobs[7:], second.sampled_logprobs)
    assert targets.sampled_logprobs[4:7].isnan().all()
