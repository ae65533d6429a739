"""Prefix KL against the slow reference, its gradient, and what must not change it."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopd_losses.core.blockwise_head import Head, LossTerm, blockwise_head
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.prefix.boundaries import places_of
from mopd_losses.prefix.shared_units import NO_UNIT
from mopd_losses.prefix.targets import PrefixTargets
from tests.losses.permuted import permuted
from tests.losses.prefix_pairs import LongestMatch, Pair, Problem, Tongue, compared, random_problem
from tests.reference import prefix_kl as slow

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
every = pytest.mark.parametrize("divergence", DIVERGENCES)
seeds = st.integers(0, 2**32)


def value_and_gradient(
    problem: Problem, targets: PrefixTargets | None = None, **config: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Per token, and by the logits of the sum of what stands at each token, each its own share."""
    if targets is None:
        targets = problem.pair.targets([problem.comparison])
    logits = problem.logits.detach().clone().requires_grad_()
    found = problem.pair.value(logits, targets, **config).per_token
    (found * torch.linspace(1, 2, len(found), dtype=torch.float64)).sum().backward()
    assert logits.grad is not None
    return found.detach().numpy(), logits.grad.numpy()


@every
@given(seeds, st.sampled_from([0.0, 1e-2, 0.5]))
@settings(deadline=None, max_examples=40)
def test_the_loss_equals_the_slow_reference(divergence: str, seed: int, mass_floor: float) -> None:
    problem = random_problem(seed)
    targets = problem.pair.targets([problem.comparison], mass_floor=mass_floor)
    found = problem.pair.value(problem.logits, targets, divergence=divergence)
    expected = slow.per_token(problem.student_side(), problem.teacher_side, divergence, mass_floor)
    np.testing.assert_allclose(found.per_token.numpy(), expected, rtol=0, atol=1e-10)


@given(seeds)
@settings(deadline=None, max_examples=30)
def test_what_is_measured_equals_slow_sums(seed: int) -> None:
    problem = random_problem(seed)
    targets = problem.pair.targets([problem.comparison], mass_floor=0.5)
    measured = problem.pair.value(problem.logits, targets).measured
    places = slow.places(problem.student_side(), problem.teacher_side)
    places = [place for place in places if place.teacher]
    shares = [1 - place.teacher_rest for place in places]
    ours = [sum(place.student.values()) for place in places]
    paths = [place.path_mass for place in places]
    compared_here = measured["teacher_mass"] > 0  # the slow form has no places without events
    for name, expected in (
        ("teacher_mass", shares),
        ("student_mass", ours),
        ("path_mass", paths),
        ("path_weight", np.minimum(1, np.array(paths) / 0.5)),
    ):
        found = measured[name][compared_here].numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1.1e-6, err_msg=name)
    assert all(not found.requires_grad for found in measured.values())


@given(seeds)
@settings(deadline=None, max_examples=15)
def test_both_sides_sum_to_one_at_every_boundary(seed: int) -> None:
    problem = random_problem(seed)
    student, teacher = problem.student_side(), problem.teacher_side
    everything = {*student.tokens.values(), *teacher.tokens.values()}
    for place in slow.places(student, teacher):
        assert sum(place.teacher.values()) + place.teacher_rest == pytest.approx(1)
        cells = {
            slow.cell_of(slow.root(token, student, teacher), student, teacher, place.at)
            for token in everything
        } - {None}
        masses = slow.student_masses(student, teacher, place.at, sorted(filter(None, cells)))
        assert all(0 <= mass <= 1 + 1e-12 for mass in masses.values())
        told, _ = slow.opinion(student, teacher, place.at)
        whole = sum(mass for mass, _, _ in told)
        unnamed = sum(
            mass
            for mass, _, said in told
            if said is None
            or slow.cell_of(slow.root(said, student, teacher), student, teacher, place.at) is None
        )
        assert sum(masses.values()) + unnamed / whole == pytest.approx(1)


@given(seeds)
@settings(deadline=None, max_examples=30)
def test_what_tokens_say_across_a_boundary_is_always_asked_for(seed: int) -> None:
    problem = random_problem(seed)
    junctions = problem.pair.loss().junctions
    student, teacher = problem.comparison.student, problem.comparison.score.completion
    for junction in places_of(student, teacher, junctions).junctions:
        if junction is not None and junction.others_are_cells:
            ranks = {rank for first, last in junction.uncertain for rank in range(first, last)}
            said = [unit for unit in junction.said if unit != NO_UNIT]
            assert {int(junctions.units.ranks[unit]) for unit in said} <= ranks


@every
@given(seeds)
@settings(deadline=None, max_examples=5)
def test_gradcheck(divergence: str, seed: int) -> None:
    problem = random_problem(seed)
    targets = problem.pair.targets([problem.comparison])
    read = {*targets.group_ids.tolist(), *targets.step_ids.tolist(), 0}
    columns = torch.tensor(sorted(token for token in read if token >= 0)[:12])

    def value(some: Tensor) -> Tensor:
        logits = problem.logits.index_copy(1, columns, some)
        return problem.pair.value(logits, targets, divergence=divergence).per_token

    some = problem.logits[:, columns].clone().requires_grad_()
    assert torch.autograd.gradcheck(value, some, atol=1e-5, rtol=1e-4)


@every
@given(seeds)
@settings(deadline=None, max_examples=6)
def test_the_block_wise_head_equals_the_dense_form(divergence: str, seed: int) -> None:
    problem = random_problem(seed)
    loss = problem.pair.loss(divergence=divergence)
    targets = loss.targets([problem.comparison, problem.comparison], [0, len(problem.logits)])
    torch.manual_seed(seed)
    slots = 2 * len(problem.logits)
    hidden = torch.randn(slots, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(problem.logits.shape[1], 4, dtype=torch.float64, requires_grad=True)
    shares = torch.rand(slots, dtype=torch.float64)
    dense = loss(DenseRows(hidden @ weight.T, problem.pair.real_ids), targets)
    total = (dense.per_token * shares).sum()
    expected = torch.autograd.grad(total, [hidden, weight])
    for rows_per_block in (1, 2, 7):
        found, outputs = blockwise_head(
            hidden,
            Head(weight, problem.pair.real_ids),
            [LossTerm(loss, targets, shares)],
            rows_per_block=rows_per_block,
        )
        torch.testing.assert_close(found, total, rtol=1e-10, atol=1e-12)
        if slots:
            torch.testing.assert_close(outputs[0].per_token, dense.per_token.detach())
        for name, values in dense.measured.items() if slots else ():
            torch.testing.assert_close(outputs[0].measured[name], values)
        for gradient, exact in zip(
            torch.autograd.grad(found, [hidden, weight]), expected, strict=True
        ):
            torch.testing.assert_close(gradient, exact, rtol=1e-9, atol=1e-12)


@given(seeds)
@settings(deadline=None, max_examples=30)
def test_blocks_end_only_where_no_place_reads_both_sides_of_the_cut(seed: int) -> None:
    problem = random_problem(seed)
    targets = problem.pair.targets([problem.comparison])
    held = targets.uncuttable(len(problem.logits))
    read: list[set[int]] = [{slot} for slot in targets.slots.tolist()]
    for readings in (targets.named, targets.known):
        for place, slot in zip(readings.places.tolist(), readings.slots.tolist(), strict=True):
            read[place].add(slot)
    for cut in range(len(problem.logits) + 1):
        split = any(min(slots) < cut <= max(slots) for slots in read)
        assert bool(held[cut]) == split


@every
@given(seeds)
@settings(deadline=None, max_examples=15)
def test_adding_a_number_to_a_row_changes_nothing(divergence: str, seed: int) -> None:
    problem = random_problem(seed)
    shifts = torch.linspace(-50, 50, len(problem.logits), dtype=torch.float64).unsqueeze(1)
    shifted = Problem(
        problem.pair, problem.logits + shifts, problem.comparison, problem.teacher_side
    )
    for found, expected in zip(
        value_and_gradient(shifted, divergence=divergence),
        value_and_gradient(problem, divergence=divergence),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@given(seeds)
@settings(deadline=None, max_examples=15)
def test_padding_rows_of_the_head_have_no_influence(seed: int) -> None:
    problem = random_problem(seed)
    padding = ~problem.pair.real_ids
    louder = problem.logits.masked_fill(padding, 77.0)
    moved = Problem(problem.pair, louder, problem.comparison, problem.teacher_side)
    values, gradient = value_and_gradient(moved)
    expected, _ = value_and_gradient(problem)
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)
    assert (gradient[:, padding.numpy()] == 0).all()


@pytest.mark.parametrize("renumbered", ["student", "teacher"])
@given(seeds)
@settings(deadline=None, max_examples=10)
def test_ids_may_be_renumbered(renumbered: str, seed: int) -> None:
    problem = random_problem(seed)
    pair, comparison = problem.pair, problem.comparison
    tongue: Tongue = getattr(pair, renumbered)
    new_ids = random.Random(seed).sample(range(tongue.end), tongue.end)
    new_ids.append(tongue.end)  # added tokens are numbered after the model's
    family = permuted(tongue.family, ids=dict(enumerate(new_ids)))
    other = Tongue(family, LongestMatch(family.table))
    order = list(range(tongue.family.logit_width))  # new id -> old id
    for old, new in enumerate(new_ids):
        order[new] = old
    logits = problem.logits
    sides = {"student": pair.student, "teacher": pair.teacher, renumbered: other}
    moved_pair = Pair(sides["student"], sides["teacher"])
    student_ids = comparison.student.token_ids.tolist()
    teacher_ids = comparison.score.completion.token_ids.tolist()
    topk = comparison.score.topk
    teacher = torch.full((len(teacher_ids), pair.teacher.family.logit_width), -torch.inf).double()
    teacher = teacher.scatter(
        1, torch.tensor(topk.ids, dtype=torch.int64), torch.tensor(topk.logprobs)
    )
    kept = compared(pair, student_ids, teacher_ids, teacher, topk.k)
    if renumbered == "student":
        logits = logits[:, order]
        student_ids = [new_ids[token] for token in student_ids]
    else:
        teacher = teacher[:, order]
        teacher_ids = [new_ids[token] for token in teacher_ids]
    moved = compared(moved_pair, student_ids, teacher_ids, teacher, topk.k)
    found = moved_pair.value(logits, moved_pair.targets([moved])).per_token
    expected = pair.value(problem.logits, pair.targets([kept])).per_token
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@given(st.lists(seeds, min_size=2, max_size=3), st.integers(0, 3))
@settings(deadline=None, max_examples=15)
def test_completions_of_a_batch_do_not_touch_each_other(several: list[int], gap: int) -> None:
    pair = random_problem(5).pair
    problems = [random_problem(seed, pair=pair) for seed in several]
    offsets, rows = [], 0
    for problem in problems:
        offsets.append(rows)
        rows += len(problem.logits) + gap
    logits = torch.zeros(rows, problems[0].logits.shape[1], dtype=torch.float64)
    for offset, problem in zip(offsets, problems, strict=True):
        logits[offset : offset + len(problem.logits)] = problem.logits
    targets = pair.targets([problem.comparison for problem in problems], offsets)
    found = pair.value(logits, targets).per_token
    for offset, problem in zip(offsets, problems, strict=True):
        alone = pair.value(problem.logits, pair.targets([problem.comparison])).per_token
        part = found[offset : offset + len(alone)]
        torch.testing.assert_close(part, alone, rtol=0, atol=1e-12)
