"""Shades grow with the values, and what stands on them can be read."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_trainer.reporting.colour_scale import DARK, LIGHT, SHADES, ColourScale, scale_style

values = st.lists(st.floats(-10, 100, allow_subnormal=False), max_size=50)


def luminance(colour: str) -> float:
    """Relative, of WCAG 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("shades", [LIGHT, DARK])
def test_text_stands_out_from_every_shade(shades: tuple[tuple[str, str], ...]) -> None:
    for background, text in shades:
        low, high = sorted([luminance(background), luminance(text)])
        assert (high + 0.05) / (low + 0.05) >= 4.5, (background, text)


def test_one_shade_is_darker_than_the_other_in_order() -> None:
    light = [luminance(background) for background, _ in LIGHT]
    dark = [luminance(background) for background, _ in DARK]
    assert light == sorted(light, reverse=True)
    assert dark == sorted(dark)
    assert len(LIGHT) == len(DARK) == SHADES == len(set(light)) == len(set(dark))


@given(values, values)
def test_more_nats_never_have_a_lower_shade(told: list[float], asked: list[float]) -> None:
    scale = ColourScale.of(told)
    assert list(scale.bounds) == sorted(scale.bounds)
    shades = [scale.shade(nats) for nats in sorted(asked)]
    assert shades == sorted(shades)
    assert all(0 <= shade < SHADES for shade in shades)
    for at, bound in enumerate(scale.bounds):
        assert scale.shade(bound) > at


def test_the_last_shade_begins_where_few_values_are() -> None:
    scale = ColourScale.of([None, float("nan"), *(at / 100 for at in range(101))])
    assert scale.bounds[-1] == pytest.approx(0.97)
    assert scale.shade(0.0) == scale.shade(-3.0) == 0
    assert ColourScale.of([]).bounds[-1] == 1.0


def test_a_legend_names_every_bound_and_its_teacher() -> None:
    legend = ColourScale((0.1, 0.2, 0.3, 0.4, 0.5, 2.0)).legend("a<b")
    assert "a&lt;b, nats a token" in legend
    told = re.findall(r'<span class="s(\d)">([^<]*)</span>', legend)
    assert told == [
        ("0", "below 0.1"),
        ("1", "0.1 to 0.2"),
        ("2", "0.2 to 0.3"),
        ("3", "0.3 to 0.4"),
        ("4", "0.4 to 0.5"),
        ("5", "0.5 to 2"),
        ("6", "2 and more"),
    ]
    for shade in range(SHADES):
        assert f".s{shade} {{ background: var(--s{shade}); color: var(--t{shade}); }}" in (
            scale_style()
        )
