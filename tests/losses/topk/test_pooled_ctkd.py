"""CTKD on means over spans: equal to CTKD for spans of single tokens, zero for equal models."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.config import TopKDivergenceSettings
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.topk.pooled_ctkd import PooledCtkdLoss, pooled_targets
from mopd_losses.topk.pooled_rows import PooledRows
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss
from mopd_protocol.errors import ConfigError
from tests.losses.contract import exact_spans
from tests.losses.problems import random_problem
from tests.losses.topk_problems import DIVERGENCES, identity

seeds = st.integers(0, 2**32)
both = pytest.mark.parametrize("divergence", DIVERGENCES)


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
    chosen = TopKDivergenceSettings(divergence=divergence)  # type: ignore[arg-type]
    output, expected = (
        loss(problem.rows(), loss.targets(comparisons, offsets))  # type: ignore[arg-type]
        for loss in (
            PooledCtkdLoss(problem.projection(), chosen),
            TopKDivergenceLoss(problem.projection(), chosen),
        )
    )
    torch.testing.assert_close(output.per_token, expected.per_token, rtol=1e-5, atol=1e-6)
    for name, column in expected.measured.items():
        torch.testing.assert_close(output.measured[name], column, rtol=1e-5, atol=1e-6)


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
    with pytest.raises(ConfigError):
        PooledCtkdLoss(identity(3), warm)
    PooledCtkdLoss(identity(3), warm, teacher_temperature=2.0)
