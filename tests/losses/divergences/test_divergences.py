"""Divergences of whole distributions: published numbers, the slow reference, limits and bounds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopd_losses.config import DivergenceSettings
from mopd_losses.divergences.divergences import (
    adaptive_kl,
    divergence_of,
    entropy_aware_kl,
    forward_kl,
    jensen_shannon,
    reverse_kl,
    skewed_forward_kl,
    skewed_reverse_kl,
    total_variation,
)
from tests.losses.measures import BOUNDED, MEASURES, name_of, slow
from tests.reference.divergences import Compared, by_logits, head_and_tail_gaps

seeds = st.integers(0, 2**32)
each = pytest.mark.parametrize("measure", MEASURES, ids=name_of)
each_bounded = pytest.mark.parametrize("measure", BOUNDED, ids=name_of)

TEACHER = [0.6, 0.25, 0.1, 0.05]
STUDENT = [0.35, 0.3, 0.3, 0.05]
GOLDEN = (
    (DivergenceSettings(divergence="forward_kl"), 0.167956),
    (DivergenceSettings(divergence="reverse_kl"), 0.195631),
    (DivergenceSettings(divergence="jsd"), 0.043943),
    (DivergenceSettings(divergence="jsd", teacher_weight=0.1), 0.015199),
    (DivergenceSettings(divergence="tvd"), 0.25),
    (DivergenceSettings(divergence="skewed_forward_kl"), 0.137662),
    (DivergenceSettings(divergence="skewed_reverse_kl"), 0.149890),
    (DivergenceSettings(divergence="adaptive_kl", tail_mass=0.45), 0.181794),
    # The teacher's entropy is 1.033076; both KLs, or only reverse.
    (DivergenceSettings(divergence="entropy_aware_kl"), 0.363588),
    (DivergenceSettings(divergence="entropy_aware_kl", entropy_threshold=1.04), 0.195631),
)
golden = pytest.mark.parametrize(
    ("measure", "expected"), GOLDEN, ids=[name_of(measure) for measure, _ in GOLDEN]
)


def logs(*rows: list[float]) -> Tensor:
    """Natural logs of rows of probabilities."""
    return torch.tensor(rows, dtype=torch.float64).log()


def random_pair(seed: int, rows: int = 3) -> tuple[Tensor, Tensor]:
    """Student logits and teacher log-probabilities, from nearly flat to nearly one-hot."""
    draw = np.random.default_rng(seed)
    entries = draw.integers(2, 9)
    scale = draw.choice([0.3, 2, 8])
    logits = torch.tensor(draw.normal(size=(rows, entries)) * scale)
    teacher = torch.tensor(draw.normal(size=(rows, entries)) * scale).log_softmax(dim=1)
    return logits, teacher


def probabilities(logprobs: Tensor) -> list[list[float]]:
    return logprobs.detach().exp().tolist()


@golden
def test_the_divergences_give_the_published_numbers(
    measure: DivergenceSettings, expected: float
) -> None:
    values = divergence_of(measure)(logs(STUDENT), logs(TEACHER))
    assert values.tolist() == pytest.approx([expected], abs=5e-7)


@golden
def test_the_reference_gives_the_published_numbers_too(
    measure: DivergenceSettings, expected: float
) -> None:
    assert slow(measure)(STUDENT, TEACHER).value == pytest.approx(expected, abs=5e-7)


def test_head_and_tail_of_the_published_adaptive_kl_differ_equally() -> None:
    assert head_and_tail_gaps(STUDENT, TEACHER, 0.45) == pytest.approx((0.25, 0.25))


@each
@given(seeds)
@settings(deadline=None, max_examples=15)
def test_the_references_slopes_are_the_slopes_of_its_value(
    measure: DivergenceSettings, seed: int
) -> None:
    if measure.divergence == "adaptive_kl":
        return  # descends another function at each point; its two parts are tested
    p, t = np.random.default_rng(seed).dirichlet(np.full(4, 3.0), size=2).clip(1e-3).tolist()
    result = slow(measure)(p, t)
    for at in range(4):
        sides: list[Compared] = []
        for by in (1e-7, -1e-7):
            moved = [*p]
            moved[at] += by
            sides.append(slow(measure)(moved, t))
        slope = (sides[0].value - sides[1].value) / 2e-7
        assert result.slopes[at] == pytest.approx(slope, abs=1e-5, rel=1e-5)


@given(seeds)
@settings(deadline=None, max_examples=25)
def test_the_gradients_are_those_of_the_specification(seed: int) -> None:
    logits, teacher = random_pair(seed)
    logits.requires_grad_()
    student = logits.log_softmax(dim=1)
    p, t = student.detach().exp(), teacher.exp()
    gaps = student.detach() - teacher

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value.sum(), logits, retain_graph=True)[0]

    torch.testing.assert_close(gradient(forward_kl(student, teacher)), p - t)
    kl = (p * gaps).sum(dim=1, keepdim=True)
    torch.testing.assert_close(gradient(reverse_kl(student, teacher)), p * (gaps - kl))
    above = (p / (0.7 * p + 0.3 * t)).log()
    expected = 0.7 * p * (above - (p * above).sum(dim=1, keepdim=True))
    actual = gradient(jensen_shannon(student, teacher, teacher_weight=0.3))
    torch.testing.assert_close(actual, expected)


@each
def test_in_float32_too_two_equal_sides_cost_exactly_nothing(measure: DivergenceSettings) -> None:
    draw = np.random.default_rng(0)
    student = torch.tensor(draw.normal(size=(20, 50)) * 4).float().log_softmax(dim=1)
    assert (divergence_of(measure)(student, student.clone()) == 0).all()


@pytest.mark.parametrize("teacher_weight", [0.1, 0.5, 0.9])
def test_jsd_is_zero_and_stationary_at_equal_parts_of_a_distribution_too(
    teacher_weight: float,
) -> None:
    part = logs([0.3, 0.2, 0.1]).requires_grad_()
    values = jensen_shannon(part, part.detach().clone(), teacher_weight=teacher_weight)
    values.sum().backward()
    assert part.grad is not None
    assert values.item() == pytest.approx(0, abs=1e-15)
    np.testing.assert_allclose(part.grad.numpy(), 0, atol=1e-15)


@each
def test_one_hundred_thousand_random_pairs_are_never_below_zero(
    measure: DivergenceSettings,
) -> None:
    draw = np.random.default_rng(0)
    student, teacher = torch.tensor(
        draw.dirichlet(np.full(5, 0.6), size=(2, 100_000)).clip(1e-300)
    ).log()
    assert divergence_of(measure)(student, teacher).min() >= -1e-13


@given(seeds)
@settings(deadline=None, max_examples=40)
def test_bounded_divergences_stay_under_their_bounds(seed: int) -> None:
    logits, teacher = random_pair(seed)
    student = logits.log_softmax(dim=1)
    for weight in (0.1, 0.5, 0.8):
        entropy = -weight * math.log(weight) - (1 - weight) * math.log(1 - weight)
        assert (jensen_shannon(student, teacher, teacher_weight=weight) <= entropy + 1e-12).all()
    for skewed in (skewed_forward_kl, skewed_reverse_kl):
        assert (skewed(student, teacher, skew=0.1) <= -math.log(0.1) + 1e-12).all()
    variation = total_variation(student, teacher)
    assert (variation <= 1 + 1e-12).all()
    for kl in (forward_kl(student, teacher), reverse_kl(student, teacher)):
        assert (variation <= (kl / 2).sqrt() + 1e-12).all()  # Pinsker


@given(seeds)
@settings(deadline=None, max_examples=25)
def test_swapping_the_sides_swaps_the_directions(seed: int) -> None:
    logits, teacher = random_pair(seed)
    student = logits.log_softmax(dim=1)
    pairs = [
        (forward_kl(student, teacher), reverse_kl(teacher, student)),
        (
            skewed_forward_kl(student, teacher, skew=0.2),
            skewed_reverse_kl(teacher, student, skew=0.2),
        ),
        (
            jensen_shannon(student, teacher, teacher_weight=0.2),
            jensen_shannon(teacher, student, teacher_weight=0.8),
        ),
        (total_variation(student, teacher), total_variation(teacher, student)),
    ]
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected)


@given(seeds)
@settings(deadline=None, max_examples=25)
def test_near_its_ends_jsd_is_a_small_multiple_of_the_two_kls(seed: int) -> None:
    logits, teacher = random_pair(seed)
    student, teacher = logits.tanh().log_softmax(dim=1), teacher.tanh().log_softmax(dim=1)
    tiny = 1e-5
    near_forward = jensen_shannon(student, teacher, teacher_weight=tiny) / tiny
    torch.testing.assert_close(near_forward, forward_kl(student, teacher), rtol=1e-3, atol=1e-6)
    near_reverse = jensen_shannon(student, teacher, teacher_weight=1 - tiny) / tiny
    torch.testing.assert_close(near_reverse, reverse_kl(student, teacher), rtol=1e-3, atol=1e-6)


def test_the_ends_of_jsd_and_of_skewing_are_the_unscaled_kls() -> None:
    student, teacher = logs(STUDENT), logs(TEACHER)
    forward, reverse = forward_kl(student, teacher), reverse_kl(student, teacher)
    assert torch.equal(jensen_shannon(student, teacher, teacher_weight=0), forward)
    assert torch.equal(jensen_shannon(student, teacher, teacher_weight=1), reverse)
    assert torch.equal(skewed_forward_kl(student, teacher, skew=0), forward)
    assert torch.equal(skewed_reverse_kl(student, teacher, skew=0), reverse)
    for skewed, expected in ((skewed_forward_kl, forward), (skewed_reverse_kl, reverse)):
        torch.testing.assert_close(skewed(student, teacher, skew=1e-9), expected)


@pytest.mark.parametrize("share", [0.0, 1e-12, 1e-9, 0.3])
def test_a_share_too_small_for_float32_still_bounds_ids_that_the_other_side_rules_out(
    share: float,
) -> None:
    sure = torch.tensor([[0.0, -200.0, -40.0]])
    other = torch.tensor([[-30.0, -1.0, math.log1p(-math.exp(-1))]])
    for student, teacher in ((sure, other), (other, sure)):
        for measure in (
            DivergenceSettings(divergence="skewed_forward_kl", skew=share),
            DivergenceSettings(divergence="skewed_reverse_kl", skew=share),
            DivergenceSettings(divergence="jsd", teacher_weight=share),
            DivergenceSettings(divergence="jsd", teacher_weight=1 - share),
        ):
            leaf = student.clone().requires_grad_()
            coarse = divergence_of(measure)(leaf, teacher)
            exact = divergence_of(measure)(student.double(), teacher.double())
            torch.testing.assert_close(coarse.double(), exact, rtol=1e-4, atol=1e-9)
            (gradient,) = torch.autograd.grad(coarse.sum(), leaf)
            assert gradient.isfinite().all()


def test_adaptive_kl_follows_forward_kl_in_the_head_and_reverse_kl_in_the_tail() -> None:
    teacher = logs([0.6, 0.2, 0.12, 0.08])
    in_head, in_tail = logs([0.5, 0.3, 0.12, 0.08]), logs([0.6, 0.2, 0.16, 0.04])
    for student, pure in ((in_head, forward_kl), (in_tail, reverse_kl)):
        actual = adaptive_kl(student, teacher, tail_mass=0.25)
        torch.testing.assert_close(actual, pure(student, teacher))


@given(seeds)
@settings(deadline=None, max_examples=25)
def test_entropy_aware_kl_adds_forward_kl_only_where_the_teacher_is_uncertain(seed: int) -> None:
    logits, teacher = random_pair(seed)
    logits.requires_grad_()
    student = logits.log_softmax(dim=1)
    entropies = -(teacher.exp() * teacher).sum(dim=1)
    forward, reverse = forward_kl(student, teacher), reverse_kl(student, teacher)
    least_certain = int(entropies.argmax())
    threshold = float(entropies.sort().values[-2:].mean())  # above all but one row
    expected = reverse.clone()
    expected[least_certain] += forward[least_certain]
    actual = entropy_aware_kl(student, teacher, threshold=threshold)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual.sum(), logits, retain_graph=True),
        torch.autograd.grad(expected.sum(), logits, retain_graph=True),
    )
    torch.testing.assert_close(entropy_aware_kl(student, teacher, threshold=9.0), reverse)


def test_a_forward_kl_that_is_infinite_counts_only_where_it_is_added() -> None:
    teacher = logs([0.9, 0.1], [0.5, 0.5])
    logits = torch.tensor([[0.3, -math.inf]] * 2, dtype=torch.float64, requires_grad=True)
    values = entropy_aware_kl(logits.log_softmax(dim=1), teacher, threshold=0.6)
    assert values.tolist() == [pytest.approx(-math.log(0.9)), math.inf]
    (gradient,) = torch.autograd.grad(values[0], logits)
    assert gradient.isfinite().all()


@each
@given(seeds)
@settings(deadline=None, max_examples=20)
def test_the_order_of_ids_changes_nothing_even_where_the_teacher_has_ties(
    measure: DivergenceSettings, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    logits = torch.tensor(draw.normal(size=(3, 6)))
    teacher = torch.tensor(draw.integers(0, 3, size=(3, 6)).astype(float)).log_softmax(dim=1)
    order = torch.tensor(draw.permutation(6))
    student = logits.log_softmax(dim=1)
    values = divergence_of(measure)(student[:, order], teacher[:, order])
    torch.testing.assert_close(values, divergence_of(measure)(student, teacher))


@each
@given(seeds)
@settings(deadline=None, max_examples=20)
def test_ids_that_both_sides_rule_out_change_neither_value_nor_gradient(
    measure: DivergenceSettings, seed: int
) -> None:
    logits, teacher = random_pair(seed)
    never = torch.full((3, 2), -torch.inf, dtype=torch.float64)
    narrow, wide = logits.clone().requires_grad_(), torch.cat([never, logits], 1).requires_grad_()
    expected = divergence_of(measure)(narrow.log_softmax(dim=1), teacher)
    values = divergence_of(measure)(wide.log_softmax(dim=1), torch.cat([never, teacher], dim=1))
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-13)
    expected.sum().backward()
    values.sum().backward()
    assert narrow.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(wide.grad[:, 2:], narrow.grad, rtol=1e-12, atol=1e-13)
    assert (wide.grad[:, :2] == 0).all()


@each_bounded
@given(seeds)
@settings(deadline=None, max_examples=20)
def test_bounded_divergences_are_exact_where_one_probability_is_zero(
    measure: DivergenceSettings, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    logits, teacher = torch.tensor(draw.normal(size=(2, 4, 5)))
    logits = logits.masked_fill(torch.tensor(draw.random((4, 5)) < 0.3), -torch.inf)
    teacher = teacher.masked_fill(torch.tensor(draw.random((4, 5)) < 0.3), -torch.inf)
    logits[:, 0] = teacher[:, 1] = 0.3  # something is left on either side
    logits.requires_grad_()
    student, teacher = logits.log_softmax(dim=1), teacher.log_softmax(dim=1)
    values = divergence_of(measure)(student, teacher)
    values.sum().backward()
    assert logits.grad is not None
    for row, (p, t) in enumerate(zip(probabilities(student), probabilities(teacher), strict=True)):
        expected = slow(measure)(p, t)
        assert values[row].item() == pytest.approx(expected.value, abs=1e-12)
        gradient = by_logits(expected.slopes, p)
        np.testing.assert_allclose(logits.grad[row].numpy(), gradient, atol=1e-12)


def test_an_infinite_kl_is_infinite_and_a_nan_is_seen() -> None:
    everything, half = logs([0.5, 0.3, 0.2]), logs([0.6, 0.4, 0.0])
    assert forward_kl(everything, half).isfinite().all()
    assert forward_kl(half, everything).item() == math.inf
    assert reverse_kl(everything, half).item() == math.inf
    assert reverse_kl(half, everything).isfinite().all()
    unknown = torch.tensor([[math.nan, -1.0, -2.0]], dtype=torch.float64)
    for measure in MEASURES:
        assert divergence_of(measure)(everything, unknown).isnan().all()
        assert divergence_of(measure)(unknown, everything).isnan().all()


def test_mass_that_underflows_on_an_id_that_the_other_side_rules_out_gives_no_nan() -> None:
    student = torch.tensor([[0.0, -200.0]]).requires_grad_()
    teacher = torch.tensor([[0.0, -torch.inf]])
    for measure in MEASURES:
        value = divergence_of(measure)(student, teacher)
        assert value.item() == pytest.approx(0, abs=1e-6)
        (gradient,) = torch.autograd.grad(value.sum(), student)
        assert gradient.isfinite().all()


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_logits_stay_finite(measure: DivergenceSettings, dtype: torch.dtype) -> None:
    sizes = torch.tensor([1e4, -1e4, 60.0, 0.0], dtype=dtype)
    logits = torch.diag_embed(sizes)[:, None].repeat(1, 4, 1, 1).flatten(0, 2)
    teacher = torch.diag_embed(sizes)[None].repeat(4, 1, 1, 1).flatten(0, 2).log_softmax(dim=1)
    logits.requires_grad_()
    values = divergence_of(measure)(logits.log_softmax(dim=1), teacher)
    values.sum().backward()
    assert values.isfinite().all()
    assert (values >= -1e-6).all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_raised_before_the_softmax_lose_nothing(
    measure: DivergenceSettings, dtype: torch.dtype
) -> None:
    draw = np.random.default_rng(0)
    student, teacher = torch.tensor(draw.normal(size=(2, 50, 30)) * 3).to(dtype)
    exact, coarse = (
        divergence_of(measure)(
            student.to(raised).log_softmax(dim=1), teacher.to(raised).log_softmax(dim=1)
        )
        for raised in (torch.float64, torch.float32)
    )
    torch.testing.assert_close(coarse.double(), exact, rtol=1e-3, atol=1e-5)


@each
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_nothing_compared_costs_nothing(
    measure: DivergenceSettings, shape: tuple[int, int]
) -> None:
    student = torch.zeros(shape, requires_grad=True)
    values = divergence_of(measure)(student, torch.zeros(shape))
    assert values.tolist() == [0.0] * shape[0]
    values.sum().backward()
    assert student.grad is not None
