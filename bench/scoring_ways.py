"""Ways to request top-k log-probabilities from a teacher, each behind one call.

A call returns when the numbers are available: JSON responses are parsed, binary ones decoded.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

import httpx

from mopd_client import TeacherClient
from mopd_protocol import LogprobsDtype, SequenceRequest, decode_json

#: Settings of every engine.
MAX_MODEL_LEN = 1024
MAX_BATCHED_TOKENS = 8192
MAX_TOP_K = 128
START_SECONDS = 240.0
#: Above the concurrency of every benchmark, which limits its requests itself.
MAX_CONCURRENCY = 64


class Way(Protocol):
    """Score one sequence: the first of ``ids`` is the prompt, the others are scored."""

    async def score(self, ids: Sequence[int], k: int) -> int:
        """Return the bytes of the response body, or 0 without a network."""
        ...


class StockServer:
    """(a) vLLM's server: ``/v1/completions`` with ``prompt_logprobs``, JSON parsed."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self._url, self._http = url, http

    async def score(self, ids: Sequence[int], k: int) -> int:
        """Send one completion request that generates one token."""
        request = {
            "model": "teacher",
            "prompt": list(ids),
            "prompt_logprobs": k,
            "max_tokens": 1,
            "temperature": 0,
        }
        response = await self._http.post(f"{self._url}/v1/completions", json=request)
        response.raise_for_status()
        rows = json.loads(response.content)["choices"][0]["prompt_logprobs"]
        if len(rows) != len(ids):
            raise RuntimeError(f"{len(rows)} rows for {len(ids)} tokens")
        return len(response.content)


class InProcess:
    """(b), (c), (f) vLLM's ``AsyncLLM`` in this process: dictionaries, flat lists, no logprobs."""

    def __init__(self, engine: object, *, flat: bool | None) -> None:
        self._engine, self._flat = engine, flat
        self._requests = 0

    async def score(self, ids: Sequence[int], k: int) -> int:
        """Send one request; the engine's output is not converted."""
        from vllm import SamplingParams

        logprobs = {} if self._flat is None else {"prompt_logprobs": k, "flat_logprobs": self._flat}
        parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **logprobs)
        self._requests += 1
        name = f"{self._flat}-{self._requests}"
        prompt = {"prompt_token_ids": list(ids)}
        async for output in self._engine.generate(prompt, parameters, name):
            last = output
        if self._flat is not None and len(last.prompt_logprobs) != len(ids):
            raise RuntimeError(f"{len(last.prompt_logprobs)} rows for {len(ids)} tokens")
        return 0


class Service:
    """(d), (g) mopd service and client: binary, decoded and checked."""

    def __init__(self, client: TeacherClient, *, dtype: LogprobsDtype = "float32") -> None:
        self._client = client
        self._dtype: LogprobsDtype = dtype

    async def score(self, ids: Sequence[int], k: int) -> int:
        """Send one scoring request of one sequence; return the received bytes."""
        sequence = SequenceRequest(
            prompt_token_ids=list(ids[:1]), completion_token_ids=list(ids[1:])
        )
        (score,) = await self._client.score([sequence], top_k=k, logprobs_dtype=self._dtype)
        _require_rows(len(score.completion), ids)
        return self._client.counters.pop().received_bytes


class ServiceAsJson:
    """(e) mopd service with JSON requests and responses."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self._url, self._http = url, http

    async def score(self, ids: Sequence[int], k: int) -> int:
        """Send one scoring request of one sequence."""
        sequence = {"prompt_token_ids": list(ids[:1]), "completion_token_ids": list(ids[1:])}
        request = {"sequences": [sequence], "top_k": k}
        response = await self._http.post(f"{self._url}/v1/logprobs", json=request)
        response.raise_for_status()
        scores = decode_json(json.loads(response.content)).scores
        _require_rows(len(scores[0].completion), ids)
        return len(response.content)


def _require_rows(rows: int, ids: Sequence[int]) -> None:
    if rows != len(ids) - 1:
        raise RuntimeError(f"{rows} rows for {len(ids) - 1} tokens")


@asynccontextmanager
async def all_ways(folder: Path, logs: Path) -> AsyncIterator[dict[str, Way]]:
    """Start every way on the model in ``folder``, all at once so that rounds can take turns."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        )
        stock_port = _free_port()
        stock = await stack.enter_async_context(
            _process(_stock_command(folder, stock_port), logs / "stock.log")
        )
        vllm_service = await stack.enter_async_context(
            _process(_service_command(folder, "vllm"), logs / "service-vllm.log")
        )
        plain = await stack.enter_async_context(
            _process(_service_command(folder, "transformers"), logs / "service-transformers.log")
        )
        engine = await stack.enter_async_context(_engine(folder))
        vllm_url = await _announced(vllm_service, logs / "service-vllm.log")
        plain_url = await _announced(plain, logs / "service-transformers.log")
        stock_url = f"http://127.0.0.1:{stock_port}"
        await _wait_for_health(http, f"{stock_url}/health", stock)
        clients = [
            await stack.enter_async_context(
                TeacherClient("teacher", [url], max_concurrency=MAX_CONCURRENCY)
            )
            for url in (vllm_url, plain_url)
        ]
        for client in clients:
            await client.wait_until_ready(START_SECONDS)
        vllm_client, plain_client = clients
        yield {
            "a stock server, JSON": StockServer(stock_url, http),
            "b AsyncLLM, dictionaries": InProcess(engine, flat=False),
            "c AsyncLLM, flat lists": InProcess(engine, flat=True),
            "d our service, float32": Service(vllm_client),
            "d our service, float16": Service(vllm_client, dtype="float16"),
            "e our service, JSON": ServiceAsJson(vllm_url, http),
            "f AsyncLLM, no logprobs": InProcess(engine, flat=None),
            "g transformers engine, float32": Service(plain_client),
        }


@asynccontextmanager
async def _engine(folder: Path) -> AsyncIterator[object]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_logprobs=MAX_TOP_K,
            disable_log_stats=True,
        )
    )
    try:
        yield engine
    finally:
        engine.shutdown()
        # The destructor would shut the engine down again after vLLM's modules are unloaded.
        del AsyncLLM.__del__


@asynccontextmanager
async def _process(command: list[str], log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=errors, env=_environment()
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


def _environment() -> dict[str, str]:
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "MOPD_API_KEYS": ""}
    return {**os.environ, **settings}


def _stock_command(folder: Path, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder), "--served-model-name", "teacher"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-logprobs", str(MAX_TOP_K)),
        *("--max-num-batched-tokens", str(MAX_BATCHED_TOKENS)),
    ]


def _service_command(folder: Path, engine: str) -> list[str]:
    return [
        *(str(Path(sys.executable).parent / "mopd-teacher"), "serve", str(folder)),
        *("--name", "teacher", "--port", "0", "--engine", engine, "--dtype", "float32"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--top-k-max", str(MAX_TOP_K)),
        *("--max-batch-tokens", str(MAX_BATCHED_TOKENS)),
    ]


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
