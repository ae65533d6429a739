"""Longest stall of a teacher's event loop under responses and bodies of many megabytes.

A stand-in engine returns at once, so that parsing and encoding are all that the service does.
Probes are sent over one connection, one after the other, while four connections send requests.
"""

import argparse
import gc
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np

from bench.small_teacher import make_small_teacher
from mopd_protocol.codec import BINARY_MEDIA_TYPE
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import Engine, EngineDescription, ScoringTask
from mopd_server.process.http_server import HttpServer
from mopd_server.process.listening import bound_socket
from mopd_server.settings import ListenSettings, TeacherSettings

CONNECTIONS = 4
#: The baseline: the same connections without large messages.
SMALL = b'{"sequences": [{"prompt_token_ids": [1], "completion_token_ids": [2]}], "top_k": 1}'
WIDTH = 64
ROWS = 500


class ImmediateEngine:
    """Returns one prepared row for every token."""

    description = EngineDescription(
        engine="immediate",
        engine_version="1",
        model="immediate",
        revision="none",
        dtype="float32",
        logit_width=2048,
        max_model_len=128 * 1024,
        candidate_ids=True,
        temperature=True,
    )

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        """Return rows of ``top_k`` entries of unequal probability."""
        logprobs = np.log(np.arange(2 * top_k, top_k, -1) / (4 * top_k * top_k)).astype(np.float32)
        results: list[TopKLogprobs] = []
        for task in batch:
            rows = len(task.completion_ids)
            results.append(
                TopKLogprobs(
                    np.tile(np.arange(top_k, dtype=np.int32), (rows, 1)),
                    np.tile(logprobs, (rows, 1)),
                    np.full(rows, logprobs[-1]),
                    np.full(rows, np.log1p(-np.exp(logprobs).sum())),
                )
            )
        return results


def immediate_server(
    folder: Path,
    engine: Engine | None = None,
    max_batch_tokens: int = TeacherSettings.max_batch_tokens,
) -> HttpServer:
    """Return a server of a teacher with an engine, by default the one above, in this process."""
    from mopd_server.app import create_app
    from mopd_server.http.lifecycle import Lifecycle
    from mopd_server.scoring.service import TeacherService
    from mopd_server.scoring.tokenizer_loading import ServedTokenizer, load_tokenizer

    settings = TeacherSettings(model=str(folder), device="cpu", max_batch_tokens=max_batch_tokens)
    service = TeacherService(
        ServedTokenizer.of(load_tokenizer(settings)), engine or ImmediateEngine(), settings
    )
    service.warm = True
    gc.collect()
    gc.freeze()  # as process.serving
    return HttpServer(create_app(Lifecycle(service)), ListenSettings(), lambda: None)


def serve(folder: Path, address: "multiprocessing.Queue[str]", *options: Any) -> None:
    """Serve in this process until it is terminated; options are those of ``immediate_server``."""
    server = immediate_server(folder, *options)
    with bound_socket("127.0.0.1", 0) as bound:
        server.start(bound)
        address.put(f"http://127.0.0.1:{bound.getsockname()[1]}")
        threading.Event().wait()


def body_of(sequences: int, candidates: int, rows: int = ROWS) -> bytes:
    """Return a request; with candidates, a body of megabytes."""
    ids = [row % ROWS for row in range(rows)]
    sequence: dict[str, object] = {"prompt_token_ids": [1], "completion_token_ids": ids}
    if candidates:
        sequence["candidate_ids"] = [list(range(1000, 1000 + candidates))] * rows
    return json.dumps({"sequences": [sequence] * sequences, "top_k": WIDTH}).encode()


def text_body(sequences: int) -> bytes:
    """Return a request with one text of as many megabytes, which is too long for the teacher."""
    text = "the quick brown fox 12 " * (sequences * 2**20 // 40)
    return json.dumps({"sequences": [{"prompt": text, "completion": "x"}]}).encode()


def measure(url: str, body: bytes, accept: str, seconds: float) -> tuple[list[float], int, int]:
    """Return the latencies of probes, responses, and the bytes of one of them."""
    done = threading.Event()
    responses: list[int] = []

    def load() -> None:
        with httpx.Client(timeout=600) as client:
            while not done.is_set():
                headers = {"Content-Type": "application/json", "Accept": accept}
                response = client.post(f"{url}/v1/logprobs", content=body, headers=headers)
                assert response.status_code in (200, 413, 503), response.text[:200]
                if response.status_code != 503:
                    responses.append(len(response.content))

    threads = [threading.Thread(target=load) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    latencies: list[float] = []
    end = time.monotonic() + seconds
    with httpx.Client(timeout=600) as client:
        while time.monotonic() < end:
            started = time.monotonic()
            client.get(f"{url}/healthz")
            latencies.append(time.monotonic() - started)
            time.sleep(0.01)
    done.set()
    for thread in threads:
        thread.join()
    return latencies, len(responses), max(responses, default=0)


def resident_mebibytes(pid: int) -> int:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) // 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="per row (default: 20)")
    parser.add_argument("--sequences", type=int, default=24, help="default: 24, 16 MB of JSON")
    options = parser.parse_args(arguments)
    write: Callable[[str], int] = sys.stdout.write
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        make_small_teacher(Path(folder), vocabulary=2048)
        address: multiprocessing.Queue[str] = context.Queue()
        server = context.Process(target=serve, args=(Path(folder), address))
        server.start()
        try:
            url = address.get(timeout=300)
            assert server.pid is not None
            rows = (
                ("small requests", SMALL, BINARY_MEDIA_TYPE),
                ("JSON responses", body_of(options.sequences, 0), "application/json"),
                ("binary responses", body_of(options.sequences * 8, 0), BINARY_MEDIA_TYPE),
                ("JSON bodies", body_of(options.sequences, 200), BINARY_MEDIA_TYPE),
                ("one sequence", body_of(1, 200, options.sequences * ROWS), BINARY_MEDIA_TYPE),
                ("one text", text_body(options.sequences), BINARY_MEDIA_TYPE),
            )
            write(f"resident before: {resident_mebibytes(server.pid)} MiB\n")
            for name, body, accept in rows:
                latencies, count, size = measure(url, body, accept, options.seconds)
                p99, longest = np.quantile(latencies, 0.99), max(latencies)
                write(
                    f"{name}: body {len(body) / 2**20:.1f} MiB, response {size / 2**20:.1f} MiB, "
                    f"{count} responses, probe p99 {p99 * 1000:.0f} ms, longest "
                    f"{longest * 1000:.0f} ms, resident {resident_mebibytes(server.pid)} MiB\n"
                )
        finally:
            server.terminate()
            server.join()


if __name__ == "__main__":
    main()
