"""``ColourScale``: nats a token -> one of seven shades of one colour, with a legend."""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import isfinite

import numpy as np

#: Background and text, from little to much, on a light page.
LIGHT = (
    ("#fff6ed", "#1a1a1a"),
    ("#fee6ce", "#1a1a1a"),
    ("#fdcb9b", "#1a1a1a"),
    ("#fba762", "#1a1a1a"),
    ("#ee7f2f", "#000000"),
    ("#b94e06", "#ffffff"),
    ("#7a3003", "#ffffff"),
)
#: The same on a dark page.
DARK = (
    ("#2a1c12", "#f2f2f2"),
    ("#472a14", "#f2f2f2"),
    ("#693914", "#f2f2f2"),
    ("#8f4a10", "#ffffff"),
    ("#d27a2c", "#000000"),
    ("#f4a560", "#000000"),
    ("#ffd7ad", "#000000"),
)
SHADES = len(LIGHT)
#: Of the values; what is above has the last shade.
_TOP_PERCENTILE = 97


@dataclass(frozen=True)
class ColourScale:
    """Where each shade but the first begins, in nats; increasing.

    The bounds grow with the square, since most tokens cost little and a few cost much.
    """

    bounds: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "ColourScale":
        """A scale for these values; what was not measured is left out."""
        measured = [value for value in values if value is not None and isfinite(value)]
        top = float(np.percentile(measured, _TOP_PERCENTILE)) if measured else 0.0
        top = top if top > 0 else 1.0
        bounds = (top * (shade / (SHADES - 1)) ** 2 for shade in range(1, SHADES))
        return cls(tuple(float(f"{bound:.2g}") for bound in bounds))

    def shade(self, nats: float) -> int:
        """From 0; a value below zero has the first."""
        return sum(nats >= bound for bound in self.bounds)

    def legend(self, teacher: str) -> str:
        """The shades with what they stand for, as HTML."""
        first, last = self.bounds[0], self.bounds[-1]
        told = [
            f"below {first:g}",
            *(f"{low:g} to {high:g}" for low, high in pairwise(self.bounds)),
            f"{last:g} and more",
        ]
        swatches = (f'<span class="s{shade}">{text}</span>' for shade, text in enumerate(told))
        return f'<p class="legend">{escape(teacher)}, nats a token: {" ".join(swatches)}</p>'


def scale_style() -> str:
    """CSS variables of the shades: ``--s0`` is a background, and ``--t0`` the text on it."""

    def variables(shades: Iterable[tuple[str, str]]) -> str:
        return " ".join(
            f"--s{number}:{background};--t{number}:{text};"
            for number, (background, text) in enumerate(shades)
        )

    painted = "\n".join(
        f".s{shade} {{ background: var(--s{shade}); color: var(--t{shade}); }}"
        for shade in range(SHADES)
    )
    return (
        f":root {{ {variables(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}\n{painted}\n"
    )
