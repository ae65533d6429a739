"""Scored tokens per second at which the HTTP part of one teacher service is the limit.

    python -m bench.front_end --json front_end.json

The engine is replaced by one that returns prepared rows at once; parsing, queue, encoding and HTTP
are those of ``mopd-teacher serve``, with binary responses of top-64. A second process keeps
``--connections`` requests in flight and does not decode. Processor time is that of the service's
process; its event loop, and the threads that parse and encode, share one interpreter, so that one
divided by the processor time per token is the most that a service delivers on cores of this speed.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from bench.event_loop import immediate_server, serve
from bench.small_teacher import make_small_teacher
from mopd_protocol.codec import BINARY_MEDIA_TYPE

#: Sequences, prompt tokens and completion tokens of a request.
SHAPES = ((1, 500, 500), (1, 2000, 2000), (32, 500, 500), (8, 2000, 2000))


@dataclass(frozen=True)
class Measurement:
    """One shape of requests; one number per round."""

    shape: str
    processor_microseconds: list[float]  # of the service, per scored token
    tokens_per_second: list[float]  # scored
    bytes_per_token: float


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--connections", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--k", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory(prefix="mopd-bench-") as folder:
        make_small_teacher(Path(folder), vocabulary=2048)
        immediate_server(Path(folder))  # imports, which the process shares
        address: multiprocessing.Queue[str] = context.Queue()
        server = context.Process(target=serve, args=(Path(folder), address), daemon=True)
        server.start()
        try:
            url = address.get(timeout=300)
            process = psutil.Process(server.pid)
            rows = [_measure(url, process, shape, options) for shape in SHAPES]
        finally:
            server.terminate()
            server.join()
    _print(rows)
    if options.json:
        report = {
            "settings": {name: str(value) for name, value in vars(options).items()},
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "measurements": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def _measure(
    url: str, process: psutil.Process, shape: tuple[int, int, int], options: argparse.Namespace
) -> Measurement:
    sequences, prompt, completion = shape
    ids = [300 + number % 1500 for number in range(max(prompt, completion))]
    sequence = {"prompt_token_ids": ids[:prompt], "completion_token_ids": ids[:completion]}
    body = json.dumps({"sequences": [sequence] * sequences, "top_k": options.k}).encode()
    processor: list[float] = []
    speeds: list[float] = []
    size = 0
    for _ in range(options.rounds):
        before, started = _processor_seconds(process), time.monotonic()
        responses, size = _load(url, body, options.seconds, options.connections)
        tokens = responses * sequences * completion
        speeds.append(tokens / (time.monotonic() - started))
        processor.append(1e6 * (_processor_seconds(process) - before) / tokens)
    name = f"{sequences} x ({prompt} + {completion})"
    return Measurement(name, processor, speeds, size / (sequences * completion))


def _load(url: str, body: bytes, seconds: float, connections: int) -> tuple[int, int]:
    """Return the number of responses, and the bytes of one."""
    end = time.monotonic() + seconds
    sizes: list[int] = []

    def send() -> None:
        headers = {"content-type": "application/json", "accept": BINARY_MEDIA_TYPE}
        with httpx.Client(timeout=600, headers=headers) as client:
            while time.monotonic() < end:
                response = client.post(f"{url}/v1/logprobs", content=body)
                response.raise_for_status()
                sizes.append(len(response.content))

    threads = [threading.Thread(target=send) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(sizes), sizes[-1]


def _processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _print(rows: Sequence[Measurement]) -> None:
    table = Table(
        "request",
        "processor time per token",
        "its inverse",
        "measured here",
        "bytes per token",
        title="medians of the rounds",
    )
    for row in rows:
        microseconds = statistics.median(row.processor_microseconds)
        table.add_row(
            row.shape,
            f"{microseconds:.2f} µs",
            f"{1e6 / microseconds:,.0f} tokens/s",
            f"{statistics.median(row.tokens_per_second):,.0f} tokens/s",
            f"{row.bytes_per_token:,.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
