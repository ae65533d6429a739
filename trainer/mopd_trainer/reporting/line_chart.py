"""``line_chart``: curves over a run's steps as SVG, without a library and without scripts."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 460, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 14, 26
#: Told apart by those who see no red or green too (Okabe and Ito 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
#: More points than a chart has pixels are thinned out.
_MOST_POINTS = 800

#: (step, value) in order of the steps; ``None`` where nothing was measured.
Curve = Sequence[tuple[int, float | None]]


def line_chart(curves: Mapping[str, Curve]) -> str:
    """One ``<svg>`` with a line for each name; a line has a gap where nothing was measured.

    Empty where no curve has a single value.
    """
    values = [value for curve in curves.values() for _, value in curve if value is not None]
    if not values:
        return ""
    steps = [step for curve in curves.values() for step, _ in curve]
    across = _Scale(min(steps), max(steps), _LEFT, WIDTH - _RIGHT)
    up = _Scale(*_with_room(min(values), max(values)), HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(across, up)]
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        parts += [
            f'<polyline points="{_points(piece, across, up)}" stroke="{colour}" '
            f'class="curve"><title>{escape(name)}</title></polyline>'
            for piece in _pieces(_thinned(curve))
        ]
    drawing = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{drawing}</svg>'


class _Scale:
    """Values between ``lowest`` and ``highest`` -> pixels."""

    def __init__(self, lowest: float, highest: float, start: float, end: float) -> None:
        self.lowest = lowest
        self.highest = highest
        self._start = start
        self._length = end - start

    def __call__(self, value: float) -> float:
        span = self.highest - self.lowest
        # Divided first: a length over the smallest numbers there are would be infinite.
        return self._start + ((value - self.lowest) / span * self._length if span > 0 else 0.0)


def _with_room(lowest: float, highest: float) -> tuple[float, float]:
    room = (highest - lowest) * 0.05 or abs(highest) * 0.05 or 1.0
    below = lowest - room
    return (max(below, 0.0) if lowest >= 0 else below), highest + room


def _grid(across: _Scale, up: _Scale) -> list[str]:
    parts: list[str] = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = up.lowest + share * (up.highest - up.lowest)
        y = up(value)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3:.1f}" class="left">{value:.3g}</text>')
    for step, place in ((across.lowest, "start"), (across.highest, "end")):
        parts.append(
            f'<text x="{across(step):.1f}" y="{HEIGHT - 8}" text-anchor="{place}">'
            f"step {step:,.0f}</text>"
        )
    return parts


def _thinned(curve: Curve) -> Curve:
    every = math.ceil(len(curve) / _MOST_POINTS)
    return curve[::every] if every > 1 else curve


def _pieces(curve: Curve) -> list[list[tuple[int, float]]]:
    """The stretches without a gap; a value alone is a line of no length, which is drawn a dot."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for step, value in curve:
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((step, value))
    return [piece if len(piece) > 1 else piece * 2 for piece in pieces if piece]


def _points(piece: Sequence[tuple[int, float]], across: _Scale, up: _Scale) -> str:
    return " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in piece)
