"""Longest stalls of a teacher's event loop by unusual bodies and large responses, by cause.

In processor time, so that other programs do not count: a callback stalls the event loop for its
own time, and any other thread for the time that it keeps the interpreter's lock. A stand-in engine
returns at once. ``bench.event_loop`` measures latencies of probes.
"""

import argparse
import asyncio
import gc
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from bench.event_loop import SMALL, body_of, immediate_server
from bench.small_teacher import make_small_teacher
from mopd_protocol.codec import BINARY_MEDIA_TYPE
from mopd_server.http.body_parts import MOST_LISTS, MOST_STRINGS
from mopd_server.process.listening import bound_socket

BYTES = 15 * 2**20
_SAMPLE_SECONDS = 0.001


class StallMonitor:
    """Longest stalls in seconds of processor time, by cause."""

    def __init__(self) -> None:
        self.stalls: dict[str, float] = {}
        self._collection = 0.0
        threading.Thread(target=self._sample, name="stall-monitor", daemon=True).start()
        run = asyncio.Handle._run  # pyright: ignore[reportPrivateUsage]

        def timed(handle: asyncio.Handle) -> None:
            started = time.thread_time()
            run(handle)
            self._record("callback", time.thread_time() - started)

        setattr(asyncio.Handle, "_run", timed)  # noqa: B010
        gc.callbacks.append(self._on_collection)

    def _record(self, cause: str, seconds: float) -> None:
        self.stalls[cause] = max(self.stalls.get(cause, 0.0), seconds)

    def _on_collection(self, phase: str, _: object) -> None:
        if phase == "start":
            self._collection = time.thread_time()
        else:
            self._record("garbage collection", time.thread_time() - self._collection)

    def _sample(self) -> None:
        """Compare the times of all threads before and after each wait for the lock."""
        while True:
            before = _times()
            time.sleep(_SAMPLE_SECONDS)  # the lock is requested again at the end
            after = _times()
            for name in before.keys() & after.keys():
                self._record(f"thread {name}", after[name] - before[name])


def _times() -> dict[str, float]:
    times: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None and thread is not threading.current_thread():
            try:
                clock = time.pthread_getcpuclockid(thread.ident)
                times[thread.name.split("_")[0]] = time.clock_gettime(clock)
            except OSError:  # ended
                continue
    return times


def _list(field: str, unit: str, count: int | None = None, other: str = "prompt") -> bytes:
    """Return a request with a list of ``count`` equal values, by default of ``BYTES``."""
    values = ",".join([unit] * (BYTES // (len(unit) + 1) if count is None else count))
    return f'{{"sequences":[{{"{other}":"a","{field}":[{values}]}}]}}'.encode()


def bodies() -> Iterator[tuple[str, bytes, str]]:
    """Yield name, body, and the accepted media type."""
    keys = ",".join(f'"k{number}":1' for number in range(10**6))
    sequence = '{"prompt":"a","completion":"b"%s}'
    unusual = {
        "small request": SMALL,
        "one row of candidates": _list("candidate_ids", f"[{'1234,' * (BYTES // 5)}1]", 1),
        "empty rows": _list("candidate_ids", "[]"),
        "messages": _list("messages", '{"role":"","content":"a"}', other="completion"),
        "most messages": _list(
            "messages", '{"role":"user","content":"a"}', MOST_LISTS - 4, other="completion"
        ),
        "pieces of a completion": _list("completion", '"a"'),
        "most pieces": _list("completion", '"a"', MOST_STRINGS - 4),
        "control tokens": _list("completion", '{"control":"a"}'),
        "ids": _list("completion_token_ids", "1234"),
        "empty sequences": b'{"sequences":[' + b",".join([b"{}"] * (BYTES // 3)) + b"]}",
        "nested lists": b'{"sequences":[' + b"[" * (BYTES // 2) + b"]" * (BYTES // 2) + b"]}",
        "unknown keys": f"{{{keys}}}".encode(),
        "template variables": (
            '{"sequences":[%s]}' % (sequence % f',"chat_template_kwargs":{{{keys}}}')
        ).encode(),
        "escapes": _list("completion", '"%s"' % (r"\u0041" * (BYTES // 6)), 1),
        "list": b"[" + b"1," * (BYTES // 2) + b"1]",
        "spaces": b" " * BYTES,
        "brackets": b"[" * BYTES,
    }
    for name, body in unusual.items():
        yield name, body, BINARY_MEDIA_TYPE
    yield "JSON response", body_of(64, 0), "application/json"
    yield "binary response", body_of(1024, 0), BINARY_MEDIA_TYPE


def post(url: str, file: Path, accept: str) -> tuple[int, int]:
    """Send a body from a separate process; return the status and the bytes of the response."""
    headers = {"Content-Type": "application/json", "Accept": accept}
    response = httpx.post(
        f"{url}/v1/logprobs", content=file.read_bytes(), headers=headers, timeout=600
    )
    return response.status_code, len(response.content)


def main() -> None:
    """Print the longest stall of each body, and the cause."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    monitor = StallMonitor()
    spawn = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as temporary, ProcessPoolExecutor(1, mp_context=spawn) as client:
        folder = Path(temporary)
        make_small_teacher(folder, vocabulary=2048)
        server = immediate_server(folder)
        with bound_socket("127.0.0.1", 0) as bound:
            server.start(bound)
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            for name, body, accept in bodies():
                (folder / "body").write_bytes(body)
                monitor.stalls = {}
                status, size = client.submit(post, url, folder / "body", accept).result()
                cause, seconds = max(monitor.stalls.items(), key=lambda each: each[1])
                sys.stdout.write(
                    f"{name}: {len(body) / 2**20:.1f} MiB, status {status}, response "
                    f"{size / 2**20:.1f} MiB, longest {seconds * 1000:.0f} ms ({cause})\n"
                )
                sys.stdout.flush()
            server.stop()


if __name__ == "__main__":
    main()
