"""``Claim``: the result of one experiment, with the rule that would falsify it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

#: Arm -> x and y of a curve, one per seed.
Curves = dict[str, list[list[tuple[float, float]]]]


@dataclass(frozen=True)
class Claim:
    """One claim: its arms, what was measured, and whether it was reproduced."""

    name: str
    claim: str
    falsified_if: str
    reproduced: bool
    columns: tuple[str, ...]
    rows: dict[str, list[list[float]]]
    """Arm -> one row of numbers per column, with one number per seed."""
    curves: Curves
    axes: tuple[str, str]
    note: str
    seconds: float  # of the processor

    def json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def span(values: Sequence[float], form: str = ".1%") -> str:
    """Return the mean, with the range of several values if it is half a percent or more."""
    mean = format(fmean(values), form)
    if max(values) - min(values) < 0.005:
        return mean
    return f"{mean} ({format(min(values), form)}–{format(max(values), form)})"
