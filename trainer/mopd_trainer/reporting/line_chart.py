"""``line_chart``: curves over the steps of a run as SVG.

Own code, because a page that opens from a file without a network has to contain its plotting
library (Plotly 4.5 MB, Bokeh 1 MB), and the chart needs only lines, a grid and gaps.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 460, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 14, 26
#: Distinguishable with colour blindness (Okabe and Ito 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
#: Curves with more points than the chart has pixels are thinned.
_MAX_POINTS = 800

#: (step, value) in order of the steps; ``None`` for a missing value.
Curve = Sequence[tuple[int, float | None]]


def line_chart(curves: Mapping[str, Curve]) -> str:
    """Return an ``<svg>`` with a line for each name, with gaps for missing values.

    Returns an empty string if no curve has a value.
    """
    values = [value for curve in curves.values() for _, value in curve if value is not None]
    if not values:
        return ""
    steps = [step for curve in curves.values() for step, _ in curve]
    x = _Scale(min(steps), max(steps), _LEFT, WIDTH - _RIGHT)
    y = _Scale(*_padded(min(values), max(values)), HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(x, y)]
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        for segment in _segments(curve[:: max(1, math.ceil(len(curve) / _MAX_POINTS))]):
            points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in segment)
            parts.append(
                f'<polyline points="{points}" stroke="{colour}" class="curve">'
                f"<title>{escape(name)}</title></polyline>"
            )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


class _Scale:
    """Linear map of ``[low, high]`` to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low = low
        self.high = high
        self._start = start
        self._length = end - start

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        # Divide first: a length divided by the smallest numbers would be infinite.
        return self._start + ((value - self.low) / span * self._length if span > 0 else 0.0)


def _padded(low: float, high: float) -> tuple[float, float]:
    padding = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (max(low - padding, 0.0) if low >= 0 else low - padding), high + padding


def _grid(x: _Scale, y: _Scale) -> Iterator[str]:
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = y.low + share * (y.high - y.low)
        row = y(value)
        yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{row:.1f}" y2="{row:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{row + 3:.1f}" class="left">{value:.3g}</text>'
    for step, anchor in ((x.low, "start"), (x.high, "end")):
        position = f'x="{x(step):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}"'
        yield f"<text {position}>step {step:,.0f}</text>"


def _segments(curve: Curve) -> list[list[tuple[int, float]]]:
    """Split at missing values; a single value is a line of length 0, which is drawn as a dot."""
    segments: list[list[tuple[int, float]]] = [[]]
    for step, value in curve:
        if value is None:
            segments.append([])
        else:
            segments[-1].append((step, value))
    return [segment if len(segment) > 1 else segment * 2 for segment in segments if segment]
