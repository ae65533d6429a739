"""Truncated divergences: published numbers, the slow reference, and what each form promises."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopd_losses.config import TopKDivergenceSettings
from mopd_losses.core.loss_output import LossOutput
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.divergences.divergences import divergence_of
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss, topk_divergence
from mopd_losses.topk.topk_targets import TopKTargets
from mopd_protocol.errors import ConfigError, DataError
from tests.losses.measures import F_DIVERGENCES, TRUNCATED, name_of, slow
from tests.losses.places import Problem, identity, random_problem, targets_of
from tests.reference import divergences as reference
from tests.reference.topk_divergence import place

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


def loss(
    problem: Problem, chosen: TopKDivergenceSettings, teacher_temperature: float = 1.0
) -> LossOutput:
    return topk_divergence(
        DenseRows(problem.logits, torch.tensor(problem.real)),
        problem.targets,
        problem.projection(),
        chosen,
        teacher_temperature=teacher_temperature,
    )


def of(logits: Tensor, targets: TopKTargets, chosen: TopKDivergenceSettings) -> Tensor:
    """Per-token values where both sides have one vocabulary."""
    projection = identity(logits.shape[1])
    return topk_divergence(
        DenseRows(logits, projection.real_ids), targets, projection, chosen
    ).per_token


def value_and_gradient(
    problem: Problem, chosen: TopKDivergenceSettings, teacher_temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    logits = problem.logits.detach().clone().requires_grad_()
    found = loss(replace(problem, logits=logits), chosen, teacher_temperature).per_token
    found.sum().backward()
    assert logits.grad is not None
    return found.detach().numpy(), logits.grad.numpy()


def slow_value_and_gradient(
    problem: Problem, chosen: TopKDivergenceSettings, teacher_temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    values, gradients = np.zeros(len(problem.logits)), np.zeros(problem.logits.shape)
    targets = problem.targets
    for slot, ids, logprobs, tail in zip(
        *(c.tolist() for c in (targets.slots, targets.ids, targets.logprobs)),
        targets.tail_logprobs.tolist(),
        strict=True,
    ):
        values[slot], gradients[slot] = place(
            problem.logits[slot].tolist(),
            problem.real.tolist(),
            problem.weights.tolist(),
            {i: math.exp(lp) for i, lp in zip(ids, logprobs, strict=True) if i >= 0},
            math.exp(tail),
            form=chosen.form,
            divergence=slow(chosen),
            forward=chosen.divergence == "forward_kl",
            floored=chosen.unbounded_where_teacher_vanishes,
            temperature=chosen.kd_temperature or teacher_temperature,
            teacher_temperature=teacher_temperature,
        )
    return values, gradients


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-8) -> None:
    scale = 1 + np.abs(expected).max(initial=0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


@golden
def test_the_forms_give_the_published_numbers(
    form: str, divergence: str, value: float, gradient: list[float] | None
) -> None:
    logits = STUDENT.log().requires_grad_()
    found = of(logits, targets_of(TEACHER, [[0, 1]]), chosen_by(form, divergence))
    assert found.item() == pytest.approx(value, abs=5e-7)
    found.sum().backward()
    assert logits.grad is not None
    if gradient is not None:
        np.testing.assert_allclose(logits.grad[0].numpy(), gradient, atol=1e-6)


@golden
def test_the_reference_gives_the_published_numbers_too(
    form: str, divergence: str, value: float, gradient: list[float] | None
) -> None:
    problem = Problem(
        STUDENT.log(), targets_of(TEACHER, [[0, 1]]), np.eye(4), np.ones(4, dtype=np.bool_)
    )
    values, gradients = slow_value_and_gradient(problem, chosen_by(form, divergence))
    assert values[0] == pytest.approx(value, abs=5e-7)
    if gradient is not None:
        np.testing.assert_allclose(gradients[0], gradient, atol=1e-6)


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


@each
@given(seeds, st.sampled_from([0.5, 1.0, 3.0]))
@settings(deadline=None, max_examples=25)
def test_value_and_gradient_equal_the_slow_reference(
    chosen: TopKDivergenceSettings, seed: int, teacher_temperature: float
) -> None:
    problem = random_problem(seed)
    value, gradient = value_and_gradient(problem, chosen, teacher_temperature)
    expected, slopes = slow_value_and_gradient(problem, chosen, teacher_temperature)
    assert_close(value, expected)
    assert_close(gradient, slopes, 1e-7)


@pytest.mark.parametrize(
    "chosen", [c for c in TRUNCATED if c.divergence != "adaptive_kl"], ids=name_of
)
def test_gradcheck(chosen: TopKDivergenceSettings) -> None:
    draw = np.random.default_rng(0)
    targets = targets_of(draw.dirichlet(np.ones(4), size=2), [[0, 2], [1, 3, 0]])
    weights = draw.dirichlet(np.ones(4), size=3)
    problem = Problem(torch.tensor(draw.normal(size=(2, 3))), targets, weights, np.full(3, True))
    logits = torch.tanh(problem.logits).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: loss(replace(problem, logits=z), chosen).per_token, logits, atol=1e-5, rtol=1e-4
    )


@each
@given(seeds)
@settings(deadline=None, max_examples=15)
def test_at_equality_value_and_gradient_are_zero(chosen: TopKDivergenceSettings, seed: int) -> None:
    draw = np.random.default_rng(seed)
    weights = draw.dirichlet(np.ones(5), size=7)
    logits = torch.tensor(draw.normal(size=(2, 7)))
    teacher = (logits.softmax(dim=1) @ torch.tensor(weights)).numpy()
    targets = targets_of(teacher, [[0, 3], [1, 2, 4]])
    problem = Problem(logits, targets, weights, np.ones(7, dtype=np.bool_))
    value, gradient = value_and_gradient(problem, chosen)
    np.testing.assert_allclose(value, 0, atol=1e-12)
    if chosen.divergence != "tvd":  # has a corner there, and rounding is on either side of it
        np.testing.assert_allclose(gradient, 0, atol=1e-12)


@given(seeds, st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_the_forms_are_ordered_as_the_specification_says(seed: int, k: int) -> None:
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
    ours = torch.stack([row[ids].sum() for row, _, ids in rows])
    theirs = torch.stack([row[ids].sum() for _, row, ids in rows])
    binary = theirs * (theirs / ours).log() + (1 - theirs) * ((1 - theirs) / (1 - ours)).log()
    scaled, bucketed = (
        of(logits, targets, chosen_by(form)) for form in ("renormalised", "tail_bucket")
    )
    torch.testing.assert_close(bucketed, theirs * scaled + binary)


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
        found = of(STUDENT.log(), targets, chosen_by(form, divergence))
        assert found.item() == pytest.approx(expected, abs=1e-5)


def test_only_the_tail_bucket_and_the_generalised_form_see_mass_outside_the_top_k() -> None:
    targets = targets_of(TEACHER, [[0, 1]])
    scaled = torch.tensor([[0.12, 0.05, 0.5, 0.33]], dtype=torch.float64).log()
    assert of(scaled, targets, chosen_by("renormalised")).item() == pytest.approx(0, abs=1e-12)
    assert of(scaled, targets, chosen_by("generalised")).item() > 0.1
    assert of(scaled, targets, chosen_by("tail_bucket")).item() > 0.1


@pytest.mark.parametrize("chosen", [c for c in TRUNCATED if c.form == "renormalised"], ids=name_of)
def test_a_single_renormalised_entry_compares_nothing(chosen: TopKDivergenceSettings) -> None:
    logits = STUDENT.log().requires_grad_()
    found = of(logits, targets_of(TEACHER, [[1]]), chosen)
    found.sum().backward()
    assert found.item() == 0
    assert logits.grad is not None
    assert logits.grad.abs().max() <= 1e-16


@pytest.mark.parametrize("chosen", [c for c in TRUNCATED if c.form == "renormalised"], ids=name_of)
@pytest.mark.parametrize("kd_temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("teacher_temperature", [1.0, 2.0])
def test_renormalised_entries_of_any_temperature_give_those_of_any_other_exactly(
    chosen: TopKDivergenceSettings, kd_temperature: float, teacher_temperature: float
) -> None:
    draw = np.random.default_rng(0)
    ours, theirs = torch.tensor(draw.normal(size=(2, 3, 7)) * 2)
    kept = [[0, 3, 5], [1, 2], [6, 0, 1, 2]]
    scored = targets_of(theirs.div(teacher_temperature).softmax(dim=1).numpy(), kept)
    rows = DenseRows(ours, torch.ones(7, dtype=torch.bool))
    found = topk_divergence(
        rows,
        scored,
        identity(7),
        chosen.model_copy(update={"kd_temperature": kd_temperature}),
        teacher_temperature=teacher_temperature,
    ).per_token
    for row, ids in enumerate(kept):
        student, teacher = (
            side[row : row + 1, ids].div(kd_temperature).log_softmax(dim=1)
            for side in (ours, theirs)
        )
        expected = kd_temperature**2 * divergence_of(chosen)(student, teacher)
        torch.testing.assert_close(found[row : row + 1], expected)


@pytest.mark.parametrize("form", ["generalised", "tail_bucket"])
def test_a_temperature_that_the_teacher_did_not_score_at_is_refused(form: str) -> None:
    projection = identity(4)
    with pytest.raises(ConfigError) as refused:
        TopKDivergenceLoss(projection, chosen_by(form, kd_temperature=2))
    assert str(refused.value) == (
        f"form '{form}' at kd_temperature 2 needs a teacher that scored at 2, but this one scored "
        "at 1: a truncated distribution does not say what its tail weighs at another temperature; "
        "set the teacher's temperature, or use form 'renormalised'"
    )
    with pytest.raises(ConfigError):
        TopKDivergenceLoss(projection, chosen_by(form, kd_temperature=1), teacher_temperature=2)
    scored_so = TopKDivergenceLoss(
        projection, chosen_by(form, kd_temperature=2), teacher_temperature=2
    )
    unsaid = TopKDivergenceLoss(projection, chosen_by(form), teacher_temperature=2)
    rows, targets = DenseRows(STUDENT.log(), projection.real_ids), targets_of(TEACHER, [[0, 1]])
    found = scored_so(rows, targets).per_token
    assert torch.equal(found, unsaid(rows, targets).per_token)
    cold = TopKDivergenceLoss(projection, chosen_by(form))(rows, targets).per_token
    assert not torch.allclose(found, cold, rtol=1e-2)


@each
@given(seeds)
@settings(deadline=None, max_examples=10)
def test_shifts_orders_and_absent_entries_change_nothing(
    chosen: TopKDivergenceSettings, seed: int
) -> None:
    problem = random_problem(seed)
    targets = problem.targets
    draw = np.random.default_rng(seed)
    entries = torch.tensor(draw.permutation(targets.ids.shape[1]), dtype=torch.int64)
    absent = (len(targets.slots), 2)
    moved = replace(
        problem,
        logits=problem.logits + torch.linspace(-50, 50, len(problem.logits)).unsqueeze(1),
        targets=TopKTargets(
            targets.slots,
            torch.cat([torch.full(absent, -1), targets.ids[:, entries]], dim=1),
            torch.cat([torch.full(absent, -torch.inf), targets.logprobs[:, entries]], dim=1),
            targets.tail_logprobs,
        ),
    )
    for found, expected in zip(
        value_and_gradient(moved, chosen), value_and_gradient(problem, chosen), strict=True
    ):
        assert_close(found, expected, 1e-7)


@each
@pytest.mark.parametrize("garbage", [1e4, float("nan")])
def test_garbage_in_padding_rows_of_the_head_changes_neither_loss_nor_gradient(
    chosen: TopKDivergenceSettings, garbage: float
) -> None:
    draw = np.random.default_rng(0)
    logits = torch.tensor(draw.normal(size=(3, 7)))
    logits[:, 5:] = garbage
    targets = targets_of(draw.dirichlet(np.ones(5), size=3), [[0, 1], [4], [2, 3, 0]])
    real = np.arange(7) < 5
    narrow = Problem(logits[:, :5], targets, np.eye(5), real[:5])
    value, gradient = value_and_gradient(Problem(logits, targets, np.eye(7, 5), real), chosen)
    expected_value, expected_gradient = value_and_gradient(narrow, chosen)
    np.testing.assert_array_equal(value, expected_value)
    np.testing.assert_array_equal(gradient[:, :5], expected_gradient)
    np.testing.assert_array_equal(gradient[:, 5:], 0)


@each
def test_an_id_that_the_student_rules_out_is_compared_no_more(
    chosen: TopKDivergenceSettings,
) -> None:
    teacher = np.array([[0.5, 0.2, 0.2, 0.1]])
    logits = torch.tensor([[1.0, -torch.inf, 0.5, 0.2]], dtype=torch.float64, requires_grad=True)
    found = of(logits, targets_of(teacher, [[0, 1, 2]]), chosen)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    without = of(logits, targets_of(teacher, [[0, 2]]), chosen)
    (expected,) = torch.autograd.grad(without.sum(), logits)
    torch.testing.assert_close(found, without)
    torch.testing.assert_close(gradient, expected)


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_extreme_logits_and_one_hot_teachers_stay_finite(
    chosen: TopKDivergenceSettings, dtype: torch.dtype
) -> None:
    one_hot = np.array([[1.0, 0, 0, 0], [0, 0, 0, 1], [0.5, 0.5, 0, 0], [0.25] * 4])
    for kept in ([], [0, 1], [0, 1, 2, 3]):
        targets = targets_of(one_hot, [[i for i in kept if row[i] > 0] for row in one_hot])
        for size in (1e4, -1e4):
            logits = torch.zeros(4, 4, dtype=dtype)
            logits[:, 1] = size
            logits.requires_grad_()
            found = of(logits, targets, chosen)
            found.sum().backward()
            assert found.isfinite().all()
            assert logits.grad is not None
            assert logits.grad.isfinite().all()


@each
@pytest.mark.parametrize(
    ("tokens", "k", "places"), [(0, 0, 0), (0, 2, 0), (3, 0, 0), (3, 2, 0), (3, 0, 2), (3, 2, 2)]
)
def test_empty_input_costs_nothing_and_keeps_its_graph(
    chosen: TopKDivergenceSettings, tokens: int, k: int, places: int
) -> None:
    targets = TopKTargets(
        torch.arange(places),
        torch.full((places, k), -1),
        torch.full((places, k), -torch.inf),
        torch.full((places,), -torch.inf),
    )
    logits = torch.randn(tokens, 4, requires_grad=True)
    found = of(logits, targets, chosen)
    assert found.tolist() == [0.0] * tokens
    found.sum().backward()
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_every_form_measures_the_same_masses() -> None:
    problem = random_problem(3)
    expected = loss(problem, chosen_by("tail_bucket")).measured
    assert set(expected) == {"teacher_mass", "student_mass", "unsupported_mass", "unprojected_mass"}
    for form in ("renormalised", "generalised"):
        found = loss(problem, chosen_by(form)).measured
        for name, mass in expected.items():
            assert torch.equal(found[name], mass)
            assert not mass.requires_grad


@pytest.mark.parametrize("divergence", ["reverse_kl", "jsd", "skewed_reverse_kl", "adaptive_kl"])
def test_where_a_teacher_has_no_tail_unbounded_divergences_are_held_by_its_floor(
    divergence: str,
) -> None:
    ends = {"jsd": {"teacher_weight": 1.0}, "skewed_reverse_kl": {"skew": 0.0}}
    chosen = chosen_by("tail_bucket", divergence, **ends.get(divergence, {}))
    logits = torch.tensor([[-1e3, 1e3]], dtype=torch.float64)
    found = of(logits, targets_of(np.array([[1.0, 0.0]]), [[0]]), chosen).item()
    if divergence == "adaptive_kl":
        assert 4 < found < 2000
    else:
        assert found == pytest.approx(-math.log(1e-4))


@pytest.mark.parametrize("measure", F_DIVERGENCES, ids=name_of)
def test_bounded_divergences_see_the_teachers_tail_as_it_is(
    measure: TopKDivergenceSettings,
) -> None:
    teacher = np.array([[1 - 2e-5, 2e-5]])
    logits = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    chosen = chosen_by("tail_bucket", **measure.model_dump())
    found = of(logits, targets_of(teacher, [[0]]), chosen).item()
    exact = divergence_of(measure)(logits.log_softmax(dim=1), torch.tensor(teacher).log()).item()
    if measure.divergence == "reverse_kl":
        assert found < exact - 0.1
    else:
        assert found == pytest.approx(exact, abs=1e-12)


def test_logits_of_another_width_are_refused() -> None:
    rows = DenseRows(torch.zeros(1, 3), torch.ones(3, dtype=torch.bool))
    targets = targets_of(TEACHER, [[0]])
    with pytest.raises(DataError, match="logits of width 3 for a projection of 4 rows"):
        topk_divergence(rows, targets, identity(4), chosen_by("renormalised"))
