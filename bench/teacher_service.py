"""Processor time per completion token of every way to request scores from a teacher.

    python -m bench.teacher_service --json teacher_service.json

Needs vLLM (make vllm). One small model is served by every way at the same time. A shape is
``PROMPT+COMPLETION`` tokens, or ``PROMPT+COMPLETIONxSAMPLES`` for requests of several completions
of one prompt. All ways take turns within each round, so that a noisy minute affects all of them,
and no prompt is sent twice to one way. The first round is a warm-up and is not counted.

Processor time is that of all processes: client, server and engine. ``--baseline`` names a checkout
of another version, whose service is measured as ``vllm-before`` and ``transformers-before``.
"""

import argparse
import asyncio
import json
import logging
import os
import platform
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.scoring_ways import WAYS, Samples, Way, started_ways
from bench.small_teacher import make_small_teacher
from bench.whole_steps import measure_steps

#: Ratios of processor time: name of the result, way, way it is compared with.
RATIOS = {
    "of the service before": ("this service with vllm", "this service with vllm, before"),
    "of the transformers engine": ("this service with vllm", "this service with transformers"),
    "of flat lists in process": ("this service with vllm", "vLLM in process, flat lists"),
    "of the stock server": ("this service with vllm", "stock vLLM server, JSON parsed"),
    "transformers, of before": (
        "this service with transformers",
        "this service with transformers, before",
    ),
}


@dataclass(frozen=True)
class Shape:
    """Tokens of prompt and completion, and completions of one prompt."""

    prompt: int
    completion: int
    samples: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Parse ``PROMPT+COMPLETION`` or ``PROMPT+COMPLETIONxSAMPLES``."""
        match = re.fullmatch(r"(\d+)\+(\d+)(?:x(\d+))?", text)
        if match is None:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected a shape such as 1500+100x8")
        return cls(*(int(number) for number in match.groups(default="1")))

    def __str__(self) -> str:
        """Return the text that ``parse`` accepts."""
        samples = "" if self.samples == 1 else f"x{self.samples}"
        return f"{self.prompt}+{self.completion}{samples}"


@dataclass(frozen=True)
class Measurement:
    """One way with one shape: one number per round, per completion token."""

    way: str
    vocabulary: int
    shape: str
    processor_microseconds: list[float]
    wall_microseconds: list[float]
    bytes_per_token: float


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--baseline", type=Path, help="checkout of another version")
    parser.add_argument("--ways", type=_words, default=list(WAYS)[:4], help=",".join(WAYS))
    parser.add_argument(
        "--shapes",
        type=lambda text: [Shape.parse(word) for word in _words(text)],
        default="1+500,200+200,1500+100,1500+100x8,4000+25",
        help="(default: %(default)s)",
    )
    parser.add_argument("--vocabulary", type=int, default=2048, help="(default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=32, help="of a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--k", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument(
        "--steps", action="store_true", help="whole training steps instead (bench/whole_steps.py)"
    )
    options = parser.parse_args()
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    console = Console()
    with TemporaryDirectory(prefix="mopd-bench-") as temporary:
        folder = Path(temporary) / "model"
        if options.steps:
            measurements = asyncio.run(measure_steps(folder, options, console))
        else:
            make_small_teacher(folder, vocabulary=options.vocabulary, hidden=options.hidden)
            rows = asyncio.run(_measure_all(folder, options, console))
            _print(rows, console)
            measurements = [asdict(row) for row in rows]
    if options.json:
        report = {
            "settings": {name: str(value) for name, value in vars(options).items()},
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "versions": {name: version(name) for name in ("transformers", "torch")},
            "measurements": measurements,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


async def _measure_all(
    folder: Path, options: argparse.Namespace, console: Console
) -> list[Measurement]:
    generator = np.random.default_rng(0)
    measurements: list[Measurement] = []
    async with started_ways(folder, folder.parent, options.ways, options.baseline) as ways:
        for shape in options.shapes:
            results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
            for _ in range(options.rounds + 1):
                requests = list(_requests(generator, shape, options))
                for name, way in ways.items():
                    results[name].append(await _measure(way, requests, options.k))
            for name, rounds in results.items():
                processor, wall, sizes = zip(*rounds[1:], strict=True)
                measurements.append(
                    Measurement(
                        name, options.vocabulary, str(shape), [*processor], [*wall], sizes[-1]
                    )
                )
                microseconds = statistics.median(processor)
                console.print(f"{shape}  {name}: {microseconds:,.0f} µs of processor time")
    return measurements


def _requests(
    generator: np.random.Generator, shape: Shape, options: argparse.Namespace
) -> Iterator[Samples]:
    for _ in range(max(options.sequences // shape.samples, 1)):
        draw = generator.integers(1, 300, shape.prompt + shape.samples * shape.completion)
        prompt, completions = np.split(draw, [shape.prompt])
        yield Samples(prompt.tolist(), completions.reshape(shape.samples, -1).tolist())


async def _measure(way: Way, requests: Sequence[Samples], k: int) -> tuple[float, float, float]:
    """Return processor and wall time in microseconds, and bytes, per completion token."""
    processor, started = _processor_seconds(way), time.perf_counter()
    sizes = await asyncio.gather(*[way.score(samples, k) for samples in requests])
    wall = time.perf_counter() - started
    tokens = sum(len(ids) for samples in requests for ids in samples.completions)
    return (
        1e6 * (_processor_seconds(way) - processor) / tokens,
        1e6 * wall / tokens,
        sum(sizes) / tokens,
    )


def _processor_seconds(way: Way) -> float:
    times = [process.cpu_times() for process in way.processes()]
    return time.process_time() + sum(each.user + each.system for each in times)


def _print(measurements: Sequence[Measurement], console: Console) -> None:
    shapes = list(dict.fromkeys(m.shape for m in measurements))
    cells = {(m.way, m.shape): m for m in measurements}
    table = Table(title="µs of processor time per completion token (wall time), medians")
    for column in ("", *shapes):
        table.add_column(column, justify="right" if column else "left")
    for way in dict.fromkeys(m.way for m in measurements):
        row = [cells[way, shape] for shape in shapes]
        table.add_row(way, *(_times(m) for m in row))
    for name, (way, other) in RATIOS.items():
        if {(way, shapes[0]), (other, shapes[0])} <= cells.keys():
            ratios = [_ratio(cells[way, shape], cells[other, shape]) for shape in shapes]
            table.add_row(name, *(f"{ratio:.2f}" for ratio in ratios))
    console.print(table)


def _times(measurement: Measurement) -> str:
    processor = statistics.median(measurement.processor_microseconds)
    return f"{processor:,.0f} ({statistics.median(measurement.wall_microseconds):,.0f})"


def _ratio(first: Measurement, second: Measurement) -> float:
    """Return the median of the ratios of processor time, round by round."""
    pairs = zip(first.processor_microseconds, second.processor_microseconds, strict=True)
    return statistics.median(left / right for left, right in pairs)


def _words(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()
