"""Replicas on this machine, calls of the real client, and the times that both report."""

import asyncio
import multiprocessing
import time
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.event_loop import ImmediateEngine, immediate_server, serve
from bench.scaling.simulation import (
    Batch,
    Fleet,
    Outcome,
    Request,
    ScoredSequence,
    Served,
    ServiceTimes,
)
from mopd_client import TeacherClient
from mopd_client.services.mopd import MopdService
from mopd_client.transport.connection import Connection
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsRequest, SequenceRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import ScoringTask

#: Of random tokens: below are the entries of ``ImmediateEngine``.
_LOWEST_ID, _HIGHEST_ID = 300, 2000
_SECONDS = 600.0
_ROUNDS = 3


@dataclass
class TimedEngine(ImmediateEngine):
    """Waits for the time of a forward pass, and returns prepared rows; records its batches."""

    times: ServiceTimes
    cached_prompts: int
    replica: int
    batches: "multiprocessing.SimpleQueue[Batch]"
    _prompts: OrderedDict[bytes, None] = field(default_factory=OrderedDict[bytes, None])

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        """Return rows of ``top_k`` entries, after the time of the tokens that are computed."""
        start = time.monotonic()
        prompts = {task.prompt_ids.tobytes(): len(task.prompt_ids) for task in batch}
        computed = sum(len(task.completion_ids) for task in batch)
        computed += sum(n for prompt, n in prompts.items() if prompt not in self._prompts)
        for prompt in prompts:
            self._prompts[prompt] = None
            self._prompts.move_to_end(prompt)
        while len(self._prompts) > self.cached_prompts:
            self._prompts.popitem(last=False)
        scores = super().score(batch, top_k=top_k, temperature=temperature)
        end = start + self.times.batch_seconds + self.times.token_seconds * computed
        time.sleep(max(0.0, end - time.monotonic()))
        tokens = sum(task.tokens for task in batch)
        self.batches.put(Batch(self.replica, start, time.monotonic(), len(batch), tokens, computed))
        return scores


@dataclass(frozen=True)
class Replicas:
    """Addresses of started replicas, and the batches that they computed."""

    urls: list[str]
    batches: "multiprocessing.SimpleQueue[Batch]"


@contextmanager
def started_replicas(folder: Path, times: ServiceTimes, fleet: Fleet) -> Generator[Replicas]:
    """Serve a model folder's tokenizer in a process for each replica, with ``TimedEngine``."""
    immediate_server(folder)  # imports, which the processes share
    context = multiprocessing.get_context("fork")
    address: multiprocessing.Queue[str] = context.Queue()
    batches: multiprocessing.SimpleQueue[Batch] = context.SimpleQueue()
    processes = [
        context.Process(
            daemon=True,
            target=serve,
            args=(
                folder,
                address,
                TimedEngine(times, fleet.cached_prompts, number, batches),
                fleet.max_batch_tokens,
            ),
        )
        for number in range(fleet.replicas)
    ]
    urls: list[str] = []
    try:
        for process in processes:  # one after the other: addresses in the order of replicas
            process.start()
            urls.append(address.get(timeout=_SECONDS))
        yield Replicas(urls, batches)
    finally:
        for process in processes:
            process.terminate()
            process.join()


@dataclass
class _Timed:
    """Seconds of one response: by the service's own account, and for the client."""

    url: str = ""
    queue: float = 0.0
    prefill: float = 0.0


_CURRENT: ContextVar[_Timed] = ContextVar("current")


class TimedService(MopdService):
    """A mopd service whose timings are kept."""

    async def score(
        self, connection: Connection, request: LogprobsRequest, manifest: Manifest
    ) -> LogprobsResponse:
        """See ``Service``."""
        response = await super().score(connection, request, manifest)
        timed = _CURRENT.get()
        timed.url = response.urls[0]
        timed.queue, timed.prefill = response.timings["queue"], response.timings["prefill"]
        return response


class Load:
    """Sends requests at their times through a client that is like a run's."""

    def __init__(self, urls: Sequence[str], *, top_k: int, max_concurrency: int) -> None:
        self._urls = [*urls]
        self._top_k = top_k
        self._client = TeacherClient(
            "teacher",
            urls,
            service=TimedService(),
            max_concurrency=max_concurrency,
            timeout_seconds=_SECONDS,
            deadline_seconds=_SECONDS,
            verify=0.0,  # prepared rows are no distributions of a model
        )

    async def __aenter__(self) -> "Load":
        await self._client.wait_until_ready(_SECONDS)
        await self._client.handshake()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def run(self, requests: Sequence[Request]) -> list[Served]:
        """Return the requests with their times from the first arrival."""
        bodies = [_sequences(request) for request in requests]
        started = time.monotonic()
        pairs = zip(requests, bodies, strict=True)
        return list(await asyncio.gather(*(self._send(*pair, started) for pair in pairs)))

    async def calibrate(self, average: ScoredSequence, fleet: Fleet) -> ServiceTimes:
        """Return the times of the first replica, from requests of one batch each, one at a time.

        Args:
            average: lengths of the sequences.
            fleet: with the limit of a batch.
        """
        most = max(1, fleet.max_batch_tokens // average.tokens)
        sizes = sorted({max(1, most * share // 8) for share in (1, 2, 4, 8)}) * _ROUNDS
        rows: list[tuple[float, float, float, float]] = []
        for at, size in enumerate(sizes):
            sequences = [
                ScoredSequence(-1 - 1000 * at - n, average.prompt_tokens, average.completion_tokens)
                for n in range(size)
            ]
            request = Request(0.0, tuple(sequences))
            timed = _Timed()
            begun = time.monotonic()
            await self._score(_sequences(request), timed)
            rest = time.monotonic() - begun - timed.queue - timed.prefill
            tokens = sum(each.tokens for each in sequences)
            rows.append((tokens, request.rows, timed.prefill, rest))
        tokens, completion, prefill, rest = (
            np.median(np.reshape(column, (_ROUNDS, -1)), axis=0)
            for column in zip(*rows, strict=True)
        )
        token_seconds, batch_seconds = _line(tokens, prefill)
        row_seconds, request_seconds = _line(completion, rest)
        return ServiceTimes(batch_seconds, token_seconds, request_seconds, row_seconds)

    async def _send(
        self, request: Request, sequences: list[SequenceRequest], started: float
    ) -> Served:
        await asyncio.sleep(started + request.arrival - time.monotonic())
        timed = _Timed()
        await self._score(sequences, timed)
        # The service reports a duration: it is entered as the time between queued and started.
        return Served(
            request,
            sent=request.arrival,
            replica=self._urls.index(timed.url),
            started=timed.queue,
            finished=time.monotonic() - started,
        )

    async def _score(self, sequences: list[SequenceRequest], timed: _Timed) -> None:
        token = _CURRENT.set(timed)
        try:
            await self._client.score(sequences, top_k=self._top_k)
        finally:
            _CURRENT.reset(token)


def outcome(replicas: Replicas, served: Sequence[Served]) -> Outcome:
    """Return a measured outcome, with the batches since the last call."""
    batches: list[Batch] = []
    while not replicas.batches.empty():
        batches.append(replicas.batches.get())
    return Outcome(served, batches, len(replicas.urls))


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return slope and intercept, neither below 0, of the least relative squares."""
    if len(x) == 1:
        return float(y[0] / x[0]), 0.0
    slope, intercept = np.polyfit(x, y, 1, w=1 / np.maximum(y, 1e-6))
    if intercept < 0:
        return float(np.mean(y / x)), 0.0
    return (float(slope), float(intercept)) if slope > 0 else (0.0, float(y.mean()))


def _sequences(request: Request) -> list[SequenceRequest]:
    """Return sequences of random ids; those of one prompt begin with the same ids."""
    generator = np.random.default_rng(len(request.sequences))
    return [
        SequenceRequest(
            prompt_token_ids=_ids(np.random.default_rng(each.prompt % 2**32), each.prompt_tokens),
            completion_token_ids=_ids(generator, each.completion_tokens),
        )
        for each in request.sequences
    ]


def _ids(generator: np.random.Generator, count: int) -> list[int]:
    return generator.integers(_LOWEST_ID, _HIGHEST_ID, count).tolist()
