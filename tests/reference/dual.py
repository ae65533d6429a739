"""Numbers that know their derivatives: references write a formula once and get its gradient too.

Forward-mode differentiation in plain Python: ``f(a + b e) = f(a) + f'(a) b e`` with ``e * e = 0``.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Dual:
    """A value, and its derivative by every variable."""

    value: float
    slopes: NDArray[np.float64] | float = 0.0

    def __add__(self, other: "Number") -> "Dual":
        other = dual(other)
        return Dual(self.value + other.value, self.slopes + other.slopes)

    def __mul__(self, other: "Number") -> "Dual":
        other = dual(other)
        return Dual(self.value * other.value, self.slopes * other.value + other.slopes * self.value)

    def __neg__(self) -> "Dual":
        return self * -1

    def __sub__(self, other: "Number") -> "Dual":
        return self + -dual(other)

    def __rsub__(self, other: "Number") -> "Dual":
        return dual(other) - self

    def __truediv__(self, other: "Number") -> "Dual":
        other = dual(other)
        return self * Dual(1 / other.value, -1 / other.value**2 * other.slopes)

    def __rtruediv__(self, other: "Number") -> "Dual":
        return dual(other) / self

    __radd__ = __add__
    __rmul__ = __mul__


Number: TypeAlias = Dual | float


def dual(number: Number) -> Dual:
    """A plain number is a constant."""
    return number if isinstance(number, Dual) else Dual(float(number))


def exp(x: Number) -> Dual:
    x = dual(x)
    return Dual(math.exp(x.value), math.exp(x.value) * x.slopes)


def log(x: Number) -> Dual:
    x = dual(x)
    return Dual(math.log(x.value), 1 / x.value * x.slopes)


def magnitude(x: Number) -> Dual:
    x = dual(x)
    return x if x.value > 0 else -x if x.value < 0 else Dual(0.0)


def at_least(x: Number, floor: float) -> Dual:
    x = dual(x)
    return x if x.value >= floor else Dual(floor)


def total(numbers: Iterable[Number]) -> Dual:
    result = Dual(0.0)
    for number in numbers:
        result = result + number
    return result


def product(numbers: Iterable[Number]) -> Dual:
    result = Dual(1.0)
    for number in numbers:
        result = result * number
    return result


def descending(numbers: Iterable[Number]) -> list[Dual]:
    return sorted((dual(number) for number in numbers), key=lambda x: -x.value)


def variables(rows: Sequence[Sequence[float]]) -> list[list[Dual]]:
    """Make every entry a separate variable, counted row by row."""
    count = sum(len(row) for row in rows)
    duals: list[list[Dual]] = []
    at = 0
    for row in rows:
        duals.append([Dual(value, np.eye(count)[at + i]) for i, value in enumerate(row)])
        at += len(row)
    return duals


def softmax(logits: Sequence[Dual], real: Sequence[bool], temperature: float = 1.0) -> list[Dual]:
    """Probabilities over the real ids, zero elsewhere."""
    top = max(z.value for z, keep in zip(logits, real, strict=True) if keep)
    powers = [
        exp((z - top) / temperature) if keep else Dual(0.0)
        for z, keep in zip(logits, real, strict=True)
    ]
    mass = total(powers)
    return [power / mass for power in powers]
