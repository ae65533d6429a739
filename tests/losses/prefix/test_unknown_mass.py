"""Tests of distributions that are filled towards others: the slow twin, and certain mass."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.prefix.unknown_mass import UnknownMass, filled
from tests.reference import unknown_mass as slow

masses = st.lists(st.floats(1e-4, 1.0), min_size=4, max_size=4)
#: What an entry lacks at most, a share of the other side's: nothing, any mass, or a part.
shares = st.sampled_from([0.0, 1.0])


@given(
    known=masses,
    towards=masses,
    missing=st.lists(shares, min_size=3, max_size=3),
    limited=st.dictionaries(st.integers(0, 2), st.floats(1e-3, 0.999), max_size=2),
    bound=st.sampled_from([0.0, 1e-3]) | st.floats(0.1, 30.0),
    certain=st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0),
    has_rest=st.booleans(),
)
@settings(deadline=None)
def test_filled_equals_the_slow_twin(
    known: list[float],
    towards: list[float],
    missing: list[float],
    limited: dict[int, float],
    bound: float,
    certain: float,
    has_rest: bool,
) -> None:
    towards = [*towards[:3], towards[3] * has_rest]
    known, towards = ([value / math.fsum(side) for value in side] for side in (known, towards))
    most = [*missing, 1.0]  # the rest may lack any mass
    for entry, share in limited.items():
        most[entry] = share
    columns = [torch.tensor([each], dtype=torch.float64).log() for each in (known, towards, most)]
    bounds = [torch.tensor([each], dtype=torch.float64).log() for each in (bound, certain * bound)]
    result = filled(*columns[:2], UnknownMass(columns[2], *bounds))[0].exp().tolist()
    is_missing = [share > 0 for share in most]
    limits = [share or 1.0 for share in most]
    expected = slow.filled(known, towards, is_missing, bound, limits, certain * bound)
    assert result == pytest.approx(expected, abs=1e-9)


def test_certain_mass_that_no_cell_can_have_is_in_the_rest_and_has_a_gradient() -> None:
    known = torch.tensor([[0.999, 0.001]], dtype=torch.float64).log()
    towards = torch.tensor([[0.99, 0.01]], dtype=torch.float64).log()
    missing = torch.tensor([[0.01, 1.0]], dtype=torch.float64).log()
    bound = torch.tensor([2.0], dtype=torch.float64).log()
    certain = bound.clone().requires_grad_()
    result = filled(known, towards, UnknownMass(missing, bound, certain))
    assert result[0, 1].exp().item() == pytest.approx((2 - 0.03) / 3, abs=1e-2)
    (gradient,) = torch.autograd.grad(result[0, 0], certain)
    assert gradient.item() < -0.5
