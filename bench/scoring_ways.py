"""Ways to request top-k log-probabilities from a teacher, each behind one call.

A call returns when the numbers are available: JSON responses are parsed, binary ones decoded.
"""

import asyncio
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx
import psutil

from mopd_client import TeacherClient
from mopd_protocol import SequenceRequest

#: Settings of every engine.
MAX_MODEL_LEN = 4095
MAX_BATCHED_TOKENS = 8192
MAX_TOP_K = 128
START_SECONDS = 900.0
#: Above the concurrency of every benchmark, which limits its requests itself.
MAX_CONCURRENCY = 64


@dataclass(frozen=True)
class Samples:
    """Completions of one prompt, which are one request."""

    prompt: list[int]
    completions: list[list[int]]


class Way(Protocol):
    """A way to score completions."""

    async def score(self, samples: Samples, k: int) -> int:
        """Return the bytes of the response body, or 0 without a network."""
        ...

    def processes(self) -> list[psutil.Process]:
        """Return the processes that score, without this one."""
        ...


class StockServer:
    """vLLM's server, or a service with its route: ``/v1/completions`` with ``prompt_logprobs``."""

    def __init__(self, url: str, http: httpx.AsyncClient, process: psutil.Process) -> None:
        self._url, self._http, self._process = url, http, process

    async def score(self, samples: Samples, k: int) -> int:
        """Send a completion request of one generated token for each sequence."""
        return sum(
            await asyncio.gather(
                *[self._score(samples.prompt + completion, k) for completion in samples.completions]
            )
        )

    async def _score(self, ids: list[int], k: int) -> int:
        request = {
            "model": "teacher",
            "prompt": ids,
            "prompt_logprobs": k,
            "max_tokens": 1,
            "temperature": 0,
        }
        response = await self._http.post(f"{self._url}/v1/completions", json=request)
        response.raise_for_status()
        rows = json.loads(response.content)["choices"][0]["prompt_logprobs"]
        _require_rows(len(rows), len(ids))
        return len(response.content)

    def processes(self) -> list[psutil.Process]:
        """Return the server and its engine."""
        return _tree(self._process)


class InProcess:
    """vLLM's ``AsyncLLM`` in this process: flat lists, or no log-probabilities at all."""

    def __init__(self, engine: object, *, logprobs: bool) -> None:
        self._engine, self._logprobs = engine, logprobs
        self._requests = 0

    async def score(self, samples: Samples, k: int) -> int:
        """Send each sequence; the engine's output is not converted."""
        await asyncio.gather(
            *[self._score(samples.prompt + completion, k) for completion in samples.completions]
        )
        return 0

    async def _score(self, ids: list[int], k: int) -> None:
        from vllm import SamplingParams

        logprobs = {"prompt_logprobs": k, "flat_logprobs": True} if self._logprobs else {}
        parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **logprobs)
        self._requests += 1
        name = f"{self._logprobs}-{self._requests}"
        async for output in self._engine.generate({"prompt_token_ids": ids}, parameters, name):
            last = output
        if self._logprobs:
            _require_rows(len(last.prompt_logprobs), len(ids))

    def processes(self) -> list[psutil.Process]:
        """Return the engine's process."""
        children = multiprocessing.active_children()
        return [each for child in children for each in _tree(psutil.Process(child.pid))]


class Service:
    """mopd service and client: binary, decoded and checked."""

    def __init__(self, client: TeacherClient, process: psutil.Process, url: str) -> None:
        self._client, self._process, self.url = client, process, url

    async def score(self, samples: Samples, k: int) -> int:
        """Send one scoring request; return the received bytes."""
        return await self.score_all([samples], k)

    async def score_all(self, step: Sequence[Samples], k: int) -> int:
        """Score several prompts in one call of the client; return the received bytes."""
        pairs = [(each.prompt, completion) for each in step for completion in each.completions]
        scores = await self._client.score(
            [
                SequenceRequest(prompt_token_ids=prompt, completion_token_ids=completion)
                for prompt, completion in pairs
            ],
            top_k=k,
        )
        for score, (_, completion) in zip(scores, pairs, strict=True):
            _require_rows(len(score.completion), len(completion))
        return self._client.counters.pop().received_bytes

    def processes(self) -> list[psutil.Process]:
        """Return the service and its engine."""
        return _tree(self._process)


def _require_rows(rows: int, expected: int) -> None:
    if rows != expected:
        raise RuntimeError(f"{rows} rows for {expected} tokens")


def _tree(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


@asynccontextmanager
async def started_ways(
    folder: Path, logs: Path, names: Collection[str], baseline: Path | None
) -> AsyncIterator[dict[str, Way]]:
    """Start ways on the model in ``folder``, all at once so that rounds can take turns.

    Args:
        names: of ``WAYS``.
        baseline: checkout of the services whose names end in "before".
    """
    async with AsyncExitStack() as stack:
        ways: dict[str, Way] = {}
        for name in names:
            ways |= await stack.enter_async_context(WAYS[name](folder, logs, baseline))
        yield ways


@asynccontextmanager
async def _stock(folder: Path, logs: Path, _: Path | None) -> AsyncIterator[dict[str, Way]]:
    port = _free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder), "--served-model-name", "teacher"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", str(MAX_MODEL_LEN + 1), "--max-logprobs", str(MAX_TOP_K)),
        *("--max-num-batched-tokens", str(MAX_BATCHED_TOKENS)),
    ]
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(timeout=None, limits=limits) as http,
        _process(command, logs / "stock.log") as server,
    ):
        url = f"http://127.0.0.1:{port}"
        await _wait_for_health(http, f"{url}/health", server)
        yield {"stock vLLM server, JSON parsed": StockServer(url, http, psutil.Process(server.pid))}


@asynccontextmanager
async def _engine(folder: Path, _: Path, __: Path | None) -> AsyncIterator[dict[str, Way]]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            dtype="float32",
            max_model_len=MAX_MODEL_LEN + 1,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_logprobs=MAX_TOP_K,
            disable_log_stats=True,
        )
    )
    try:
        yield {
            "vLLM in process, flat lists": InProcess(engine, logprobs=True),
            "vLLM without log-probabilities": InProcess(engine, logprobs=False),
        }
    finally:
        engine.shutdown()
        # The destructor would shut the engine down again after vLLM's modules are unloaded.
        del AsyncLLM.__del__


def _service(
    engine: str, *, before: bool = False, completions: bool = False
) -> Callable[[Path, Path, Path | None], AbstractAsyncContextManager[dict[str, Way]]]:
    suffix = ", before" if before else ", JSON parsed" if completions else ""
    name = f"this service with {engine}{suffix}"

    @asynccontextmanager
    async def start(
        folder: Path, logs: Path, baseline: Path | None
    ) -> AsyncIterator[dict[str, Way]]:
        command = [
            *(str(Path(sys.executable).parent / "mopd-teacher"), "serve", str(folder)),
            *("--name", "teacher", "--port", "0", "--engine", engine, "--dtype", "float32"),
            *("--max-model-len", str(MAX_MODEL_LEN), "--top-k-max", str(MAX_TOP_K)),
            *("--max-batch-tokens", str(MAX_BATCHED_TOKENS)),
        ]
        log = logs / f"{name.replace(' ', '-')}.log"
        source = baseline if before else None
        async with _process(command, log, source) as process:
            address = await _announced(process, log)
            client = TeacherClient(
                "teacher",
                [address],
                max_concurrency=MAX_CONCURRENCY,
                timeout_seconds=START_SECONDS,
                deadline_seconds=START_SECONDS,
            )
            async with client:
                await client.wait_until_ready(START_SECONDS)
                server = psutil.Process(process.pid)
                if not completions:
                    yield {name: Service(client, server, address)}
                    return
                limits = httpx.Limits(max_connections=None)
                async with httpx.AsyncClient(timeout=None, limits=limits) as http:
                    yield {name: StockServer(address, http, server)}

    return start


#: Name on the command line -> ways that one server or engine provides.
WAYS: dict[
    str, Callable[[Path, Path, Path | None], AbstractAsyncContextManager[dict[str, Way]]]
] = {
    "stock": _stock,
    "flat": _engine,
    "vllm": _service("vllm"),
    "transformers": _service("transformers"),
    "vllm-completions": _service("vllm", completions=True),
    "transformers-completions": _service("transformers", completions=True),
    "vllm-before": _service("vllm", before=True),
    "transformers-before": _service("transformers", before=True),
}


@asynccontextmanager
async def _process(
    command: Sequence[str], log: Path, source: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=errors, env=_environment(source)
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                await asyncio.wait_for(process.communicate(), timeout=30)
            except TimeoutError:
                process.kill()
                await process.communicate()


def _environment(source: Path | None) -> dict[str, str]:
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "MOPD_API_KEYS": ""}
    if source is not None:
        packages = [source, *(source / name for name in ("protocol", "server"))]
        settings["PYTHONPATH"] = os.pathsep.join(map(str, packages))
    return {**os.environ, **settings}


async def _announced(process: asyncio.subprocess.Process, log: Path) -> str:
    """Return the address in a service's start message."""
    assert process.stdout is not None
    async with asyncio.timeout(START_SECONDS):
        async for line in process.stdout:
            words = line.decode().split()
            if words and words[0] == "address":
                return words[1]
    raise RuntimeError(f"a service did not start; its log is {log}")


async def _wait_for_health(
    http: httpx.AsyncClient, url: str, process: asyncio.subprocess.Process
) -> None:
    async with asyncio.timeout(START_SECONDS):
        while process.returncode is None:
            try:
                if (await http.get(url)).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.5)
    raise RuntimeError(f"the server of {url} ended with status {process.returncode}")


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]
