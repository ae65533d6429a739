"""Tokens scored a second, and bytes a token, of every way to request scores from a teacher.

    python bench/teacher_service.py --json teacher_service.json

Needs vLLM (make vllm). One small model is loaded four times: in vLLM's server, in this process, and
in our service with either engine. Each sequence is one request, with ``--concurrency`` requests in
flight; all ways take turns within each round, so that a noisy minute affects all of them. The first
round is a warm-up and is not counted. With one request in flight only every eighth sequence is
sent, which suffices for a rate.
"""

import argparse
import asyncio
import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.scoring_ways import Way, all_ways
from bench.small_teacher import make_small_teacher, token_sequences

MAIN_K = 64
MAIN_CONCURRENCY = 64
STOCK, FLAT = "a stock server, JSON", "c AsyncLLM, flat lists"
OURS, OURS_HALF = "d our service, float32", "d our service, float16"


@dataclass(frozen=True)
class Measurement:
    """Measurements of one way with one k and one number of requests in flight."""

    way: str
    k: int
    concurrency: int
    tokens_per_second: list[float]  # one a round
    bytes_per_token: float

    @property
    def median(self) -> float:
        """Return the median of tokens scored a second."""
        return statistics.median(self.tokens_per_second)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="PNG file for a plot")
    parser.add_argument("--sequences", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=500, help="scored a sequence (500)")
    parser.add_argument("--vocabulary", type=int, default=2048, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--k", type=_numbers, default=[1, 16, 64, 128], help="1,16,64,128")
    parser.add_argument("--concurrency", type=_numbers, default=[1, 8, 64], help="1,8,64")
    options = parser.parse_args()
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    console = Console()
    cells = [(k, concurrency) for k in options.k for concurrency in options.concurrency]
    with TemporaryDirectory(prefix="mopd-bench-") as temporary:
        folder = Path(temporary) / "model"
        make_small_teacher(folder, vocabulary=options.vocabulary)
        sequences = token_sequences(folder, count=options.sequences, tokens=options.tokens + 1)
        measurements = asyncio.run(_measure_all(folder, sequences, cells, options.rounds, console))
    _print(measurements, console)
    if options.json:
        report = {
            "sequences": options.sequences,
            "tokens": options.tokens,
            "vocabulary": options.vocabulary,
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "vllm": _vllm_version(),
            "measurements": [asdict(measurement) for measurement in measurements],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.plot:
        plot(measurements, options.plot)


async def _measure_all(
    folder: Path,
    sequences: Sequence[Sequence[int]],
    cells: Sequence[tuple[int, int]],
    rounds: int,
    console: Console,
) -> list[Measurement]:
    with console.status("starting two servers and three engines, about two minutes"):
        stack = all_ways(folder, folder.parent)
        ways = await stack.__aenter__()
    measurements: list[Measurement] = []
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("measuring", total=len(cells) * (rounds + 1) * len(ways))
            for k, concurrency in cells:
                sent = sequences[::8] if concurrency == 1 else sequences
                speeds: dict[str, list[float]] = {name: [] for name in ways}
                sizes: dict[str, float] = {}
                for number in range(rounds + 1):
                    for name, way in ways.items():
                        speed, size = await _measure(way, sent, k, concurrency)
                        sizes[name] = size
                        if number:
                            speeds[name].append(speed)
                        progress.advance(task)
                measurements += [Measurement(n, k, concurrency, speeds[n], sizes[n]) for n in ways]
    finally:
        await stack.__aexit__(*sys.exc_info())
    return measurements


async def _measure(
    way: Way, sequences: Sequence[Sequence[int]], k: int, concurrency: int
) -> tuple[float, float]:
    """Return tokens scored a second, and bytes a scored token."""
    turns = asyncio.Semaphore(concurrency)

    async def score(ids: Sequence[int]) -> int:
        async with turns:
            return await way.score(ids, k)

    started = time.perf_counter()
    sizes = await asyncio.gather(*[score(ids) for ids in sequences])
    seconds = time.perf_counter() - started
    tokens = sum(len(ids) - 1 for ids in sequences)
    return tokens / seconds, sum(sizes) / tokens


def _print(measurements: Sequence[Measurement], console: Console) -> None:
    for k in dict.fromkeys(m.k for m in measurements):
        console.print(_table([m for m in measurements if m.k == k], k))
    main_cell = {
        m.way: m for m in measurements if (m.k, m.concurrency) == (MAIN_K, MAIN_CONCURRENCY)
    }
    if not main_cell:
        return
    for name, value, bar in _bars(main_cell):
        good = value >= bar if bar > 0 else value <= -bar
        console.print(
            f"{'reached' if good else 'MISSED '} {name}: {value:.2f} "
            f"(bar: {'at least' if bar > 0 else 'at most'} {abs(bar)})"
        )


def _table(measurements: Sequence[Measurement], k: int) -> Table:
    stock = {m.concurrency: m.median for m in measurements if m.way == STOCK}
    table = Table(title=f"tokens scored a second (median), and against (a): k {k}")
    table.add_column("requests in flight")
    for concurrency in stock:
        table.add_column(f"{concurrency}", justify="right")
    table.add_column("bytes/token", justify="right")
    for name in dict.fromkeys(m.way for m in measurements):
        of_way = [m for m in measurements if m.way == name]
        shown = [f"{m.median:,.0f}  {m.median / stock[m.concurrency]:.1f} ×" for m in of_way]
        size = of_way[0].bytes_per_token
        table.add_row(name, *shown, f"{size:,.0f}" if size else "—")
    return table


def _bars(cell: dict[str, Measurement]) -> list[tuple[str, float, float]]:
    """Return name, value and bar of each figure; a negative bar is an upper bound."""
    paired = zip(
        cell[OURS].tokens_per_second,
        cell[STOCK].tokens_per_second,
        cell[FLAT].tokens_per_second,
        strict=True,
    )
    ratios = [(service / stock, service / flat) for service, stock, flat in paired]
    return [
        ("our service / stock server", statistics.median(r[0] for r in ratios), 12.0),
        ("our service / flat lists in process", statistics.median(r[1] for r in ratios), 0.85),
        ("bytes a candidate, float32", cell[OURS].bytes_per_token / MAIN_K, -8.5),
        ("bytes a candidate, float16", cell[OURS_HALF].bytes_per_token / MAIN_K, -6.5),
    ]


def plot(measurements: Sequence[Measurement], path: Path) -> None:
    """Plot rates over k, one panel for each number of requests in flight."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    flights = sorted({m.concurrency for m in measurements})
    figure, panels = pyplot.subplots(
        1, len(flights), figsize=(4.2 * len(flights), 4.4), sharey=True, squeeze=False
    )
    for panel, concurrency in zip(panels[0], flights, strict=True):
        for name in dict.fromkeys(m.way for m in measurements):
            of_way = [m for m in measurements if m.way == name and m.concurrency == concurrency]
            style = "-" if "our service" in name else "--"
            panel.plot(
                [m.k for m in of_way], [m.median for m in of_way], style, marker="o", label=name
            )
        panel.set_title(f"{concurrency} in flight")
        panel.set_xlabel("k")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.grid(alpha=0.3, which="both")
    panels[0][0].set_ylabel("tokens scored a second")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=150)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _vllm_version() -> str:
    import vllm

    return f"{vllm.__version__}, transformers {version('transformers')}"


if __name__ == "__main__":
    main()
