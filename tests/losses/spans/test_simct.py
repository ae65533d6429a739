"""SimCT: the atoms are a partition on both sides, and zero exactly where the two agree on it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.core.student_rows import DenseRows
from mopd_losses.divergences.truncation import student_tail
from mopd_losses.projection.vocabulary_match import VocabularyMatch
from mopd_losses.spans.simct import SimctLoss, span_atoms
from tests.losses.contract import exact_spans
from tests.losses.problems import random_problem, with_full_rows
from tests.losses.spans.test_gold import all_rows, span_pairs
from tests.losses.topk_problems import DIVERGENCES

seeds = st.integers(0, 2**32)
both = pytest.mark.parametrize("divergence", DIVERGENCES)


@given(seed=seeds)
@settings(deadline=None, max_examples=40)
def test_masses_sum_to_one_on_both_sides(seed: int) -> None:
    problem = random_problem(seed)
    atoms = span_atoms(problem.rows(), exact_spans(problem), problem.match())
    kept = torch.where(atoms.retained, atoms.teacher, -torch.inf).exp().sum(dim=1)
    np.testing.assert_allclose((kept + atoms.teacher_rest.exp()).numpy(), 1, atol=2e-6)
    student_mass = torch.where(atoms.retained, atoms.student, -torch.inf).exp().sum(dim=1)
    assert (student_mass <= 1 + 1e-12).all()
    rest = student_tail(atoms.student, atoms.retained).exp()
    np.testing.assert_allclose((student_mass + rest).numpy(), 1, atol=2e-6)


def test_atoms_of_a_span_that_the_two_cut_differently() -> None:
    """Student ``a b`` (ids 0, 1) and teacher ``ab`` (id 3); also in common are 0, 1 and 2."""
    student = torch.tensor([[0.5, 0.2, 0.1, 0.2], [0.1, 0.6, 0.2, 0.1]], dtype=torch.float64)
    teacher = torch.tensor([[0.3, 0.15, 0.15, 0.4]], dtype=torch.float64)
    targets = replace(
        span_pairs([(0, 2)], [(0, 1)]),
        labels=torch.tensor([0, 1]),
        teacher_ids=torch.tensor([3]),
    )
    match = VocabularyMatch(torch.tensor([0, 1, 2, 3]), torch.zeros(4, dtype=torch.bool))
    rows = DenseRows(student.log(), all_rows(4))
    atoms = span_atoms(rows, with_full_rows(targets, teacher.log()), match)
    kept = {
        round(t.exp().item(), 6): round(p.exp().item(), 6)
        for p, t, keep in zip(atoms.student[0], atoms.teacher[0], atoms.retained[0], strict=True)
        if keep
    }
    # Two atoms of 0.15: ids 1 and 2; then the span. Id 0 begins the student's span, 3 is it.
    assert sorted(kept) == [0.15, 0.4]
    assert kept[0.4] == 0.3
    assert atoms.retained.sum() == 3
    assert atoms.teacher_rest.exp().item() == pytest.approx(0.3)
    expected_rest = 1 - 0.2 - 0.1 - 0.3
    output = SimctLoss(match, "forward_kl")(rows, with_full_rows(targets, teacher.log()))
    pairs = [(0.15, 0.2), (0.15, 0.1), (0.4, 0.3), (0.3, expected_rest)]
    assert output.per_token.tolist() == pytest.approx(
        [sum(t * np.log(t / p) for t, p in pairs), 0.0]
    )
    assert output.measured["student_span_mass"].item() == pytest.approx(0.3)
    assert output.measured["teacher_span_mass"].item() == pytest.approx(0.4)


@both
def test_a_span_that_a_side_rules_out_is_part_of_the_rest(divergence: str) -> None:
    targets = replace(
        with_full_rows(span_pairs([(0, 2)], [(0, 2)]), torch.randn(2, 3)),
        token_logprobs=torch.tensor([-torch.inf, -1.0]),
    )
    logits = torch.randn(2, 3, requires_grad=True)
    match = VocabularyMatch(torch.tensor([0, 1, 2]), torch.zeros(3, dtype=torch.bool))
    output = SimctLoss(match, divergence)(DenseRows(logits, all_rows(3)), targets)  # type: ignore[arg-type]
    assert output.per_token.isfinite().all()
    assert output.measured["teacher_span_mass"].tolist() == [0.0]
    (gradient,) = torch.autograd.grad(output.per_token.sum(), logits)
    assert gradient.isfinite().all()
