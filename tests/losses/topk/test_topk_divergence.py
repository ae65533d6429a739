"""Truncated divergences: published numbers, the slow reference, and what each form promises."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopd_losses.config import TopKDivergenceSettings
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.divergences.divergences import divergence_of
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss
from mopd_losses.topk.topk_targets import TopKTargets
from mopd_protocol.errors import ConfigError, DataError
from tests.losses.measures import F_DIVERGENCES, TRUNCATED, name_of
from tests.losses.topk_problems import identity, random_problem, targets_of, topk_loss
from tests.reference import divergences as reference

seeds = st.integers(0, 2**32)
each = pytest.mark.parametrize("chosen", TRUNCATED, ids=name_of)

TEACHER = np.array([[0.6, 0.25, 0.1, 0.05]])
STUDENT = torch.tensor([[0.35, 0.3, 0.3, 0.05]], dtype=torch.float64)
GOLDEN = (
    ("renormalised", "forward_kl", 0.058580, None),
    ("renormalised", "reverse_kl", 0.062184, None),
    ("generalised", "forward_kl", 0.077818, None),
    ("generalised", "reverse_kl", 0.066048, [-0.141765, 0.094882, 0.040186, 0.006698]),
    ("tail_bucket", "forward_kl", 0.150723, [-0.25, 0.05, 0.171429, 0.028571]),
    ("tail_bucket", "reverse_kl", 0.162602, None),
)
golden = pytest.mark.parametrize(("form", "divergence", "value", "gradient"), GOLDEN)


def chosen_by(form: str, divergence: str = "forward_kl", **more: float) -> TopKDivergenceSettings:
    return TopKDivergenceSettings.model_validate({"form": form, "divergence": divergence} | more)


def of(logits: Tensor, targets: TopKTargets, chosen: TopKDivergenceSettings) -> Tensor:
    """Return per-token values for one vocabulary."""
    return topk_loss(logits, targets, chosen).per_token


@golden
def test_the_forms_give_the_published_numbers(
    form: str, divergence: str, value: float, gradient: list[float] | None
) -> None:
    logits = STUDENT.log().requires_grad_()
    losses = of(logits, targets_of(TEACHER, [[0, 1]]), chosen_by(form, divergence))
    assert losses.item() == pytest.approx(value, abs=5e-7)
    losses.sum().backward()
    assert logits.grad is not None
    if gradient is not None:
        np.testing.assert_allclose(logits.grad[0].numpy(), gradient, atol=1e-6)


def test_plain_sums_over_a_top_k_have_their_minimum_away_from_the_teacher() -> None:
    q, t = [0.35, 0.3], [0.6, 0.25]
    assert reference.raw_forward(q, t).value == pytest.approx(0.277818, abs=5e-7)
    assert reference.raw_reverse(q, t).value == pytest.approx(-0.133952, abs=5e-7)
    for raw in (reference.raw_forward, reference.raw_reverse):
        equal = raw(t, t)
        assert equal.value == pytest.approx(0)
        pushed = reference.by_logits([*equal.slopes, 0.0, 0.0], [*t, 0.1, 0.05])
        assert max(map(abs, pushed)) > 0.05
    renormalised = [0.6 / 0.85, 0.25 / 0.85]
    assert reference.raw_forward(renormalised, t).value == pytest.approx(0.85 * math.log(0.85))
    shrunk = [0.6 / math.e, 0.25 / math.e]
    assert reference.raw_reverse(shrunk, t).value == pytest.approx(-0.85 / math.e)
    assert reference.raw_reverse(shrunk, t).slopes == pytest.approx([0, 0])


@given(seeds, st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_the_forms_are_ordered_as_in_the_specification(seed: int, k: int) -> None:
    draw = np.random.default_rng(seed)
    teacher = 0.9 * draw.dirichlet(np.ones(7), size=3) + 0.1 / 7  # no tail under the floor
    logits = torch.tensor(draw.normal(size=(3, 7)) * 2)
    kept = [draw.choice(7, k, replace=False).tolist() for _ in range(3)]
    targets = targets_of(teacher, kept)
    student = logits.log_softmax(dim=1)
    full = torch.tensor(teacher).log()
    for divergence in ("forward_kl", "reverse_kl"):
        scaled, generalised, bucketed = (
            of(logits, targets, chosen_by(form, divergence))
            for form in ("renormalised", "generalised", "tail_bucket")
        )
        whole = divergence_of(chosen_by("tail_bucket", divergence))(student, full)
        for value in (scaled, generalised, bucketed):
            assert (value >= -1e-12).all()
        assert (generalised <= bucketed + 1e-12).all()
        assert (bucketed <= whole + 1e-12).all()
    rows = list(zip(student.exp(), torch.tensor(teacher), kept, strict=True))
    student_mass = torch.stack([row[ids].sum() for row, _, ids in rows])
    teacher_mass = torch.stack([row[ids].sum() for _, row, ids in rows])
    binary = (
        teacher_mass * (teacher_mass / student_mass).log()
        + (1 - teacher_mass) * ((1 - teacher_mass) / (1 - student_mass)).log()
    )
    scaled, bucketed = (
        of(logits, targets, chosen_by(form)) for form in ("renormalised", "tail_bucket")
    )
    torch.testing.assert_close(bucketed, teacher_mass * scaled + binary)


@pytest.mark.parametrize("measure", F_DIVERGENCES, ids=name_of)
@given(seeds)
@settings(deadline=None, max_examples=10)
def test_with_a_tail_bucket_more_entries_never_lower_an_f_divergence_and_all_give_the_full_one(
    measure: TopKDivergenceSettings, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    teacher = 0.95 * draw.dirichlet(np.ones(8), size=1) + 0.05 / 8
    logits = torch.tensor(draw.normal(size=(1, 8)))
    order = np.argsort(-teacher[0]).tolist()
    chosen = chosen_by("tail_bucket", **measure.model_dump())
    values = [of(logits, targets_of(teacher, [order[:k]]), chosen).item() for k in range(9)]
    full = divergence_of(measure)(logits.log_softmax(dim=1), torch.tensor(teacher).log()).item()
    assert values[0] == pytest.approx(0, abs=1e-12)
    assert (np.diff(values[:8]) >= -1e-10).all()
    assert values[7] == pytest.approx(full, abs=1e-10)  # the rest is the last id
    assert values[8] == pytest.approx(full, abs=2e-5)  # up to the margins of two empty tails


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_with_all_entries_every_form_is_the_full_divergence(divergence: str) -> None:
    expected = {"forward_kl": 0.167956, "reverse_kl": 0.195631}[divergence]
    for form in ("renormalised", "generalised", "tail_bucket"):
        targets = targets_of(TEACHER, [[0, 1, 2, 3]])
        loss = of(STUDENT.log(), targets, chosen_by(form, divergence))
        assert loss.item() == pytest.approx(expected, abs=1e-5)


def test_only_the_tail_bucket_and_the_generalised_form_see_mass_outside_the_top_k() -> None:
    targets = targets_of(TEACHER, [[0, 1]])
    scaled = torch.tensor([[0.12, 0.05, 0.5, 0.33]], dtype=torch.float64).log()
    assert of(scaled, targets, chosen_by("renormalised")).item() == pytest.approx(0, abs=1e-12)
    assert of(scaled, targets, chosen_by("generalised")).item() > 0.1
    assert of(scaled, targets, chosen_by("tail_bucket")).item() > 0.1


@pytest.mark.parametrize("chosen", [c for c in TRUNCATED if c.form == "renormalised"], ids=name_of)
def test_a_single_renormalised_entry_compares_nothing(chosen: TopKDivergenceSettings) -> None:
    logits = STUDENT.log().requires_grad_()
    losses = of(logits, targets_of(TEACHER, [[1]]), chosen)
    losses.sum().backward()
    assert losses.item() == 0
    assert logits.grad is not None
    assert logits.grad.abs().max() <= 1e-16


@pytest.mark.parametrize("chosen", [c for c in TRUNCATED if c.form == "renormalised"], ids=name_of)
@pytest.mark.parametrize("kd_temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("teacher_temperature", [1.0, 2.0])
def test_renormalised_entries_of_any_temperature_give_those_of_any_other_exactly(
    chosen: TopKDivergenceSettings, kd_temperature: float, teacher_temperature: float
) -> None:
    draw = np.random.default_rng(0)
    student_logits, teacher_logits = torch.tensor(draw.normal(size=(2, 3, 7)) * 2)
    kept = [[0, 3, 5], [1, 2], [6, 0, 1, 2]]
    scored = targets_of(teacher_logits.div(teacher_temperature).softmax(dim=1).numpy(), kept)
    losses = topk_loss(
        student_logits,
        scored,
        chosen.model_copy(update={"kd_temperature": kd_temperature}),
        teacher_temperature=teacher_temperature,
    ).per_token
    for row, ids in enumerate(kept):
        student, teacher = (
            side[row : row + 1, ids].div(kd_temperature).log_softmax(dim=1)
            for side in (student_logits, teacher_logits)
        )
        expected = kd_temperature**2 * divergence_of(chosen)(student, teacher)
        torch.testing.assert_close(losses[row : row + 1], expected)


@pytest.mark.parametrize("form", ["generalised", "tail_bucket"])
def test_a_temperature_that_the_teacher_did_not_score_at_is_refused(form: str) -> None:
    projection = identity(4)
    with pytest.raises(ConfigError) as refused:
        TopKDivergenceLoss(projection, chosen_by(form, kd_temperature=2))
    assert refused.value.key == "loss.kd_temperature"
    with pytest.raises(ConfigError):
        TopKDivergenceLoss(projection, chosen_by(form, kd_temperature=1), teacher_temperature=2)
    scored_so = TopKDivergenceLoss(
        projection, chosen_by(form, kd_temperature=2), teacher_temperature=2
    )
    unsaid = TopKDivergenceLoss(projection, chosen_by(form), teacher_temperature=2)
    rows, targets = DenseRows(STUDENT.log(), projection.real_ids), targets_of(TEACHER, [[0, 1]])
    losses = scored_so(rows, targets).per_token
    assert torch.equal(losses, unsaid(rows, targets).per_token)
    cold = TopKDivergenceLoss(projection, chosen_by(form))(rows, targets).per_token
    assert not torch.allclose(losses, cold, rtol=1e-2)


@each
def test_an_id_that_the_student_rules_out_is_compared_no_more(
    chosen: TopKDivergenceSettings,
) -> None:
    teacher = np.array([[0.5, 0.2, 0.2, 0.1]])
    logits = torch.tensor([[1.0, -torch.inf, 0.5, 0.2]], dtype=torch.float64, requires_grad=True)
    losses = of(logits, targets_of(teacher, [[0, 1, 2]]), chosen)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    others = np.delete(teacher, 1, axis=1) / 0.8 if chosen.form == "tail_bucket" else None
    share = 1.0 if others is None else 0.8  # mass that the student cannot name is excluded
    kept = teacher if others is None else np.insert(others, 1, 0.0, axis=1)
    without = share * of(logits, targets_of(kept, [[0, 2]]), chosen)
    (expected,) = torch.autograd.grad(without.sum(), logits)
    torch.testing.assert_close(losses, without)
    torch.testing.assert_close(gradient, expected)


def test_every_form_measures_the_same_masses() -> None:
    problem = random_problem(3)
    expected = problem.loss(chosen_by("tail_bucket")).measured
    assert set(expected) == {"teacher_mass", "student_mass", "unsupported_mass", "unprojected_mass"}
    for form in ("renormalised", "generalised"):
        measured = problem.loss(chosen_by(form)).measured
        for name, mass in expected.items():
            assert torch.equal(measured[name], mass)
            assert not mass.requires_grad


@pytest.mark.parametrize(
    "divergence", ["reverse_kl", "jsd", "skewed_reverse_kl", "adaptive_kl", "entropy_aware_kl"]
)
def test_unbounded_divergences_are_limited_by_the_floor_of_a_teacher_without_tail(
    divergence: str,
) -> None:
    ends = {"jsd": {"teacher_weight": 1.0}, "skewed_reverse_kl": {"skew": 0.0}}
    chosen = chosen_by("tail_bucket", divergence, **ends.get(divergence, {}))
    logits = torch.tensor([[-1e3, 1e3]], dtype=torch.float64)
    loss = of(logits, targets_of(np.array([[1.0, 0.0]]), [[0]]), chosen).item()
    if divergence == "adaptive_kl":
        assert 4 < loss < 2000
    else:
        assert loss == pytest.approx(-math.log(1e-4), abs=2e-4)


@pytest.mark.parametrize("measure", F_DIVERGENCES, ids=name_of)
def test_bounded_divergences_see_the_teachers_tail_as_it_is(
    measure: TopKDivergenceSettings,
) -> None:
    teacher = np.array([[1 - 2e-5, 2e-5]])
    logits = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    chosen = chosen_by("tail_bucket", **measure.model_dump())
    loss = of(logits, targets_of(teacher, [[0]]), chosen).item()
    exact = divergence_of(measure)(logits.log_softmax(dim=1), torch.tensor(teacher).log()).item()
    if measure.divergence in ("reverse_kl", "entropy_aware_kl"):
        assert loss < exact - 0.1
    else:
        assert loss == pytest.approx(exact, abs=1e-12)


def test_logits_of_another_width_are_refused() -> None:
    rows = DenseRows(torch.zeros(1, 3), torch.ones(3, dtype=torch.bool))
    loss = TopKDivergenceLoss(identity(4), chosen_by("renormalised"))
    with pytest.raises(DataError) as caught:
        loss(rows, targets_of(TEACHER, [[0]]))
    assert caught.value.key == "logit_width"
