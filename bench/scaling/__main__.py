"""Number of replicas that a teacher needs: a simulation of requests, queues and batches.

    python -m bench.scaling --tokens-per-second 30000 --replicas 1,2,4,8 --rate 20000
    python -m bench.scaling --url http://teacher:8101 --replicas 1,2,4,8 --rate 20000
    python -m bench.scaling --measure --json scaling.json

The first form takes the speed of one replica from the command line, the second measures it at a
running teacher. ``--rate`` is the number of completion tokens per second that the student generates
for this teacher; without, all completions of a step are sent at once (``scoring: after_rollout``)
every ``--step-seconds``.

``--measure`` compares the simulation with services on this machine, as many as the largest number
of ``--replicas``, at several loads. The forward pass is replaced by a wait of the same form as in
the simulation, so that the replicas do not compete for the machine's cores; HTTP, queue, batches,
encoding and the client are those of a run. The simulation gets the times that were measured at one
replica over HTTP.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.scaling.replicas import Load, Replicas, outcome, started_replicas
from bench.scaling.simulation import (
    Fleet,
    Outcome,
    Request,
    ScoredSequence,
    ServiceTimes,
    simulate,
)
from bench.scaling.workload import Step, after_rollout, streamed
from bench.small_teacher import make_small_teacher

#: Share of the capacity with full batches at which requests arrive; infinite: all at once.
LOADS = {"low": 0.2, "medium": 0.5, "saturated": math.inf}
#: Of a forward pass in ``--measure``: in slow motion, so that HTTP does not wait for a core.
MEASURED = ServiceTimes(batch_seconds=0.1, token_seconds=1e-3)
#: Shorter waits are not compared: a thread needs as long to start.
LEAST_SECONDS = 0.01


@dataclass(frozen=True)
class Figures:
    """Figures of an outcome."""

    rows_per_second: float
    queue_mean: float
    queue_median: float
    queue_p95: float
    utilisation: float
    prompts_computed: float

    @classmethod
    def of(cls, result: Outcome) -> "Figures":
        """Summarize an outcome."""
        queue = result.queue_seconds
        median, p95 = np.quantile(queue, (0.5, 0.95)).tolist()
        utilisation = statistics.mean(result.utilisation)
        prompts = result.prompts_computed
        return cls(result.rows_per_second, float(queue.mean()), median, p95, utilisation, prompts)


def main() -> None:
    """Simulate or measure, print and save."""
    options = _parser().parse_args()
    console = Console()
    if options.measure:
        with TemporaryDirectory(prefix="mopd-bench-") as folder:
            make_small_teacher(Path(folder), vocabulary=2048)
            report = _measure(Path(folder), options, console)
    else:
        report = _plan(options, console)
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items()}
        machine = {"machine": platform.platform(), "cores": os.cpu_count()}
        text = json.dumps({"settings": settings, **machine, **report}, indent=2)
        options.json.write_text(text + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--tokens-per-second", type=float, default=30_000, help="of a busy replica")
    speed.add_argument("--url", help="address of a teacher whose speed is measured")
    speed.add_argument("--measure", action="store_true", help="compare with replicas here")
    parser.add_argument("--batch-seconds", type=float, default=0.02, help="besides its tokens")
    parser.add_argument("--replicas", type=_numbers, default=[1, 2, 4], help="such as 1,2,4")
    parser.add_argument("--rate", type=float, help="completion tokens of the student")
    parser.add_argument("--step-seconds", type=float, default=60.0, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="of a step (%(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=500, help="average (%(default)s)")
    parser.add_argument("--completion-tokens", type=int, default=500, help="average (%(default)s)")
    parser.add_argument("--spread", type=float, default=0.5, help="of lengths (%(default)s)")
    parser.add_argument(
        "--cached-prompts",
        type=int,
        default=200,
        help="of a replica; transformers: 0 (%(default)s)",
    )
    parser.add_argument("--max-batch-tokens", type=int, default=16_384, help="(%(default)s)")
    parser.add_argument("--max-concurrency", type=int, default=32, help="of the client")
    parser.add_argument("--top-k", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of --measure (%(default)s)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a round (%(default)s)")
    parser.add_argument("--slowness", type=float, default=1.0, help="of --measure (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


def _plan(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Simulate each number of replicas."""
    step, fleet = _step(options), _fleet(options, 1)
    times = ServiceTimes(options.batch_seconds, 1 / options.tokens_per_second)
    if options.url:
        times = asyncio.run(_calibrated([options.url], step, fleet, options))
    console.print(_times_line(times))
    table = Table(
        *("replicas", "tokens/s", "queue, median", "p95", "behind", "prompts", "utilisation"),
        caption="tokens: of completions; behind: last response after the last request; prompts: "
        "tokens computed as a multiple of those of the prompts",
    )
    results: dict[str, object] = {}
    for count in options.replicas:
        requests = _requests(step, count, options)
        result = simulate(requests, times, replace(fleet, replicas=count))
        figures = Figures.of(result)
        behind = max(each.finished for each in result.served) - requests[-1].arrival
        table.add_row(
            str(count),
            f"{figures.rows_per_second:,.0f}",
            f"{figures.queue_median:.2f} s",
            f"{figures.queue_p95:.2f} s",
            f"{behind:.1f} s",
            f"{figures.prompts_computed:.2f}",
            " ".join(f"{share:.0%}" for share in result.utilisation),
        )
        results[str(count)] = {**asdict(figures), "behind_seconds": behind}
    console.print(table)
    return {"times": asdict(times), "results": results}


def _requests(step: Step, replicas: int, options: argparse.Namespace) -> list[Request]:
    if options.rate:
        return streamed(
            step,
            rows_per_second=options.rate,
            steps=options.steps,
            seed=options.seed,
            sample_seconds=1.0,
        )
    return after_rollout(
        step,
        step_seconds=options.step_seconds,
        steps=options.steps,
        replicas=replicas,
        top_k=options.top_k,
        seed=options.seed,
    )


def _measure(folder: Path, options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Compare predictions with measurements; the error of a load is the median of its rounds."""
    step, fleet = _step(options), _fleet(options, max(options.replicas))
    engine = ServiceTimes(
        MEASURED.batch_seconds * options.slowness, MEASURED.token_seconds * options.slowness
    )
    with started_replicas(folder, engine, fleet) as replicas:
        times, pairs = asyncio.run(_measure_all(replicas, step, fleet, options, console))
    table = Table("load", "", "predicted", "measured", "error", title="medians of the rounds")
    errors: dict[str, dict[str, float]] = {}
    for load, rounds in pairs.items():
        errors[load] = {}
        for name in asdict(rounds[0][0]):
            numbers = [(getattr(first, name), getattr(second, name)) for first, second in rounds]
            predicted, measured = (
                statistics.median(column) for column in zip(*numbers, strict=True)
            )
            error = statistics.median(
                abs(first / second - 1) if max(first, second) > LEAST_SECONDS else 0.0
                for first, second in numbers
            )
            errors[load][name] = error
            table.add_row(load, name, f"{predicted:,.3f}", f"{measured:,.3f}", f"{error:.1%}")
    console.print(table)
    return {
        "times": asdict(times),
        "errors": errors,
        "rounds": {
            load: [{"predicted": asdict(p), "measured": asdict(m)} for p, m in rounds]
            for load, rounds in pairs.items()
        },
    }


async def _measure_all(
    replicas: Replicas, step: Step, fleet: Fleet, options: argparse.Namespace, console: Console
) -> tuple[ServiceTimes, dict[str, list[tuple[Figures, Figures]]]]:
    times = await _calibrated(replicas.urls[:1], step, fleet, options)
    console.print(_times_line(times))
    capacity = _capacity(step, times, fleet)
    pairs: dict[str, list[tuple[Figures, Figures]]] = {load: [] for load in LOADS}
    for number in range(options.rounds):
        for load, share in LOADS.items():
            rows = min(share, 1.0) * capacity * options.seconds
            requests = streamed(
                replace(step, prompts=round(rows / step.samples / step.completion_tokens)),
                rows_per_second=share * capacity,
                steps=1,
                seed=options.seed + number,
                sample_seconds=0.5,
            )
            outcome(replicas, [])
            async with Load(
                replicas.urls, top_k=options.top_k, max_concurrency=fleet.max_concurrency
            ) as client:
                served = await client.run(requests)
            predicted = Figures.of(simulate(requests, times, fleet))
            measured = Figures.of(outcome(replicas, served))
            pairs[load].append((predicted, measured))
            console.print(f"{load}: predicted {predicted}\n     measured {measured}")
    return times, pairs


async def _calibrated(
    urls: Sequence[str], step: Step, fleet: Fleet, options: argparse.Namespace
) -> ServiceTimes:
    average = ScoredSequence(0, step.prompt_tokens, step.completion_tokens)
    async with Load(urls, top_k=options.top_k, max_concurrency=1) as client:
        return await client.calibrate(average, fleet)


def _capacity(step: Step, times: ServiceTimes, fleet: Fleet) -> float:
    """Return the completion tokens per second of replicas with full batches."""
    sequences = max(1, fleet.max_batch_tokens // (step.prompt_tokens + step.completion_tokens))
    tokens = sequences * step.completion_tokens + sequences * step.prompt_tokens / step.samples
    seconds = times.batch_seconds + times.token_seconds * tokens
    return fleet.replicas * sequences * step.completion_tokens / seconds


def _step(options: argparse.Namespace) -> Step:
    return Step(
        options.prompts,
        options.samples,
        options.prompt_tokens,
        options.completion_tokens,
        options.spread,
    )


def _fleet(options: argparse.Namespace, replicas: int) -> Fleet:
    return Fleet(
        replicas, options.max_batch_tokens, options.max_concurrency, options.cached_prompts
    )


def _times_line(times: ServiceTimes) -> str:
    return (
        f"a batch: {1000 * times.batch_seconds:.1f} ms and {1e6 * times.token_seconds:.1f} µs per "
        f"computed token ({1 / times.token_seconds:,.0f} tokens/s); a request besides: "
        f"{1000 * times.request_seconds:.1f} ms and {1e6 * times.row_seconds:.1f} µs per row"
    )


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
