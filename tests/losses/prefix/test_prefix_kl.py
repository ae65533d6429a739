"""Prefix KL against the slow reference, its gradient, and what must not change it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.prefix.boundaries import places_of
from mopd_losses.prefix.shared_units import NO_UNIT
from tests.losses.prefix_pairs import random_problem
from tests.reference import prefix_kl as slow

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
every = pytest.mark.parametrize("divergence", DIVERGENCES)
seeds = st.integers(0, 2**32)


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


@given(seeds)
@settings(deadline=None, max_examples=30)
def test_blocks_end_only_where_no_place_reads_both_sides_of_the_cut(seed: int) -> None:
    problem = random_problem(seed)
    targets = problem.pair.targets([problem.comparison])
    held = targets.uncuttable(len(problem.logits))
    read: list[set[int]] = [{position} for position in targets.positions.tolist()]
    for readings in (targets.named, targets.known):
        for place, position in zip(
            readings.places.tolist(), readings.positions.tolist(), strict=True
        ):
            read[place].add(position)
    for cut in range(len(problem.logits) + 1):
        split = any(min(positions) < cut <= max(positions) for positions in read)
        assert bool(held[cut]) == split
