"""Estimators against enumeration and scipy."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from mopd_trainer.evaluation.statistics import pass_at_k, wilson_interval


@given(st.data(), st.integers(1, 7))
def test_pass_at_k_is_the_mean_over_all_subsets(data: st.DataObject, samples: int) -> None:
    passed, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    subsets = [*combinations([True] * passed + [False] * (samples - passed), k)]
    expected = sum(map(any, subsets)) / len(subsets)
    assert pass_at_k(samples, passed, k) == pytest.approx(expected)


@given(st.data(), st.integers(1, 500))
def test_the_interval_is_wilsons(data: st.DataObject, count: int) -> None:
    right = data.draw(st.integers(0, count))
    expected = binomtest(right, count).proportion_ci(method="wilson")
    assert wilson_interval(right / count, count) == pytest.approx((expected.low, expected.high))
