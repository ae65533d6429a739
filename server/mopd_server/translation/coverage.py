"""Coverage of translated scores: of one response, and summed up for ``/metrics``."""

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter

from mopd_losses.translation.translation import Coverage
from mopd_server.scoring.translation import CoverageReport


def report_of(
    coverage: Coverage | None,
    rows: NDArray[np.int32],
    *,
    prompt_tokens: int,
    extra_rows: int,
) -> CoverageReport:
    """Sum up the coverage of one sequence.

    Args:
        coverage: of the rows; None without any.
        rows: of the positions behind the prompt, -1 without one.
    """
    scored = rows[rows >= 0]
    signal = np.zeros(0, dtype=np.bool_) if coverage is None else coverage.has_signal[scored]
    with_signal = scored[signal]
    mass = None
    if coverage is not None and len(with_signal):
        mass = float(coverage.named_mass[with_signal].mean())
    return CoverageReport(
        prompt_tokens=prompt_tokens,
        positions=len(rows),
        without_signal=len(rows) - len(with_signal),
        named_mass=mass,
        lost_top1=0 if coverage is None else int(coverage.lost_top1[with_signal].sum()),
        extra_rows=extra_rows,
    )


class TranslationMetrics:
    """Totals of all responses, in the registry of the teacher's service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str) -> Counter:
            return Counter(f"mopd_translation_{name}", meaning, registry=registry)

        self._positions = counter("positions", "Positions behind translated prompts.")
        self._without_signal = counter(
            "positions_without_signal", "Positions behind prompts about which nothing is known."
        )
        self._named_mass = counter(
            "named_mass", "Sum over positions with a signal of the probability of named tokens."
        )
        self._lost_top1 = counter(
            "lost_top1", "Positions where the teacher's likeliest text is in the tail."
        )
        self._extra_rows = counter("extra_rows", "Rows requested besides those of completions.")

    def add(self, report: CoverageReport) -> None:
        """Add the coverage of one sequence."""
        self._positions.inc(report.positions)
        self._without_signal.inc(report.without_signal)
        self._named_mass.inc(
            (report.named_mass or 0.0) * (report.positions - report.without_signal)
        )
        self._lost_top1.inc(report.lost_top1)
        self._extra_rows.inc(report.extra_rows)
