"""CTKD on means over spans: what it is where spans are single tokens, and zero where all agree."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.config import TopKDivergenceSettings
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.topk.pooled_ctkd import PooledCtkdLoss, PooledTargets, pooled_ctkd, pooled_targets
from mopd_losses.topk.pooled_rows import PooledRows
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss
from mopd_protocol.errors import ConfigError
from tests.losses.places import DIVERGENCES, identity
from tests.losses.span_losses import exact_spans
from tests.losses.span_problems import random_problem

seeds = st.integers(0, 2**32)
both = pytest.mark.parametrize("divergence", DIVERGENCES)


def same_rows(probabilities: torch.Tensor, lengths: list[int]) -> PooledTargets:
    """One vocabulary, everything sent, spans one after the other."""
    ends = torch.tensor(lengths).cumsum(0)
    starts = ends - torch.tensor(lengths)
    means = [probabilities[a:b].mean(dim=0) for a, b in zip(starts, ends, strict=True)]
    size = probabilities.shape[1]
    return PooledTargets(
        starts,
        ends,
        torch.arange(size).repeat(len(lengths), 1),
        torch.stack(means).log(),
        torch.full((len(lengths),), -torch.inf),
    )


@both
@given(seed=seeds)
@settings(deadline=None, max_examples=10)
def test_spans_of_single_tokens_are_plain_ctkd(divergence: str, seed: int) -> None:
    problem = random_problem(seed)
    single = [
        (comparison, offset)
        for comparison, offset in zip(problem.comparisons, problem.offsets, strict=True)
        if comparison.alignment.one_to_one.all()
    ]
    comparisons, offsets = [c for c, _ in single], [o for _, o in single]
    wanted = TopKDivergenceSettings(divergence=divergence)  # type: ignore[arg-type]
    found, expected = (
        loss(problem.rows(), loss.targets(comparisons, offsets))  # type: ignore[arg-type]
        for loss in (
            PooledCtkdLoss(problem.projection(), wanted),
            TopKDivergenceLoss(problem.projection(), wanted),
        )
    )
    torch.testing.assert_close(found.per_token, expected.per_token, rtol=1e-5, atol=1e-6)
    for name, column in expected.measured.items():
        torch.testing.assert_close(found.measured[name], column, rtol=1e-5, atol=1e-6)


@both
def test_equal_rows_cost_nothing_in_spans_of_any_length(divergence: str) -> None:
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    targets = same_rows(logits.detach().softmax(dim=1), [2, 1, 3])
    settings_ = TopKDivergenceSettings(divergence=divergence)  # type: ignore[arg-type]
    rows = DenseRows(logits, torch.ones(5, dtype=torch.bool))
    output = pooled_ctkd(rows, targets, identity(5), settings_)
    # The student's tail is held above 1e-6 and the teacher's, for reverse KL, above 1e-4.
    torch.testing.assert_close(output.per_token, torch.zeros(6).double(), rtol=0, atol=1e-5)
    output.per_token.sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.zeros(6, 5).double(), rtol=0, atol=1e-5)


@given(seed=seeds)
@settings(deadline=None, max_examples=30)
def test_pooled_targets_keep_all_mass_and_name_an_id_once_a_span(seed: int) -> None:
    problem = random_problem(seed)
    targets = pooled_targets(exact_spans(problem))
    masses = targets.logprobs.exp().sum(dim=1) + targets.tail_logprobs.exp()
    np.testing.assert_allclose(masses.numpy(), 1, atol=1e-6)
    for ids in targets.ids.tolist():
        named = [token for token in ids if token >= 0]
        assert len(named) == len(set(named))
    assert torch.equal(targets.ids < 0, torch.isneginf(targets.logprobs))


def test_the_most_likely_ids_of_a_mean_are_not_those_of_its_rows() -> None:
    rows = torch.tensor([[0.5, 0.4, 0.1, 0.0], [0.0, 0.4, 0.5, 0.1]], dtype=torch.float64)
    student = DenseRows(rows.log(), torch.ones(4, dtype=torch.bool))
    mean = PooledRows(student, torch.tensor([0]), torch.tensor([2]))
    allowed = torch.tensor([True, True, True, False])
    assert mean.most_likely_ids(torch.tensor([0]), allowed, 2).tolist()[0][0] == 1
    assert mean.most_likely_ids(torch.tensor([0]), allowed, 9).shape == (1, 3)
    assert student.most_likely_ids(torch.tensor([0, 1]), allowed, 4).tolist() == [
        [0, 1, 2, -1],
        [2, 1, -1, -1],
    ]


def test_means_of_rows_are_not_warmed_after_the_fact() -> None:
    warm = TopKDivergenceSettings(form="renormalised", kd_temperature=2.0)
    with pytest.raises(ConfigError, match="span_rows 'pooled' at kd_temperature 2 needs"):
        PooledCtkdLoss(identity(3), warm)
    PooledCtkdLoss(identity(3), warm, teacher_temperature=2.0)
