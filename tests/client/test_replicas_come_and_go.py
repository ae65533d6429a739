"""Four real services found by a name: one is killed and one added while a client scores.

The services are at 127.0.0.1, 127.0.0.2, … with one port, as the pods of a Kubernetes Service.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from mopd_client.teacher_client import TeacherClient
from mopd_client.transport.clock import Clock
from mopd_client.transport.discovery import RENEW_SECONDS
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import TeacherScore
from mopd_server.app import create_app
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import TeacherSettings
from tests import tiny_models
from tests.ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROMPTS, SAMPLES, PROMPT_TOKENS = 16, 4, 64


@dataclass
class Pod:
    """A service in a thread, and the scoring requests that it received."""

    app: Any
    address: str
    port: int
    received: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])
    """Sequences of each request."""
    stuck: threading.Event = field(default_factory=threading.Event)
    """Set: requests are received without a response."""
    waiting: threading.Event = field(default_factory=threading.Event)
    """Set when a request is stuck."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Record the request and pass it on."""
        self.loop = asyncio.get_running_loop()
        if scope["path"] != "/v1/logprobs":
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        self.received.append(json.loads(body)["sequences"])
        if self.stuck.is_set():
            self.waiting.set()
            await asyncio.Event().wait()
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Any:
            return next(messages, None) or await receive()

        await self.app(scope, replay, send)

    def start(self) -> None:
        """Serve the application in a thread."""
        self.socket = socket.create_server((self.address, self.port))
        config = uvicorn.Config(self, log_config=None, lifespan="off")
        self.server = uvicorn.Server(config)
        arguments = {"sockets": [self.socket]}
        self.thread = threading.Thread(target=self.server.run, kwargs=arguments, daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """Stop and reset the connections of requests in flight."""
        connections = [*self.server.server_state.connections]
        for each in connections:
            self.loop.call_soon_threadsafe(each.transport.abort)
        self.server.force_exit = self.server.should_exit = True
        self.thread.join()
        self.socket.close()

    def pop_tokens(self) -> int:
        """Return the tokens of the sequences received since the last call."""
        received, self.received = self.received, []
        return sum(
            len(each["prompt_token_ids"]) + len(each["completion_token_ids"])
            for sequences in received
            for each in sequences
        )


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Applications of five services of one model."""
    tokenizer = tiny_models.digit_tokenizer()
    folder: Path = tmp_path_factory.mktemp("teacher")
    tiny_models.save(tiny_models.qwen(tokenizer), tokenizer, folder)
    settings = TeacherSettings(model=str(folder), name="math", device="cpu", engine="transformers")
    services = [TeacherService.load(settings) for _ in range(5)]
    for service in services:
        service.warm_up()
    yield [create_app(service) for service in services]
    for service in services:
        service.close()


@pytest.fixture
def pods(apps: list[Any]) -> Iterator[list[Pod]]:
    port = free_port()
    pods = [Pod(app, f"127.0.0.{number + 1}", port) for number, app in enumerate(apps)]
    for pod in pods:
        pod.start()
    yield pods
    for pod in pods:
        pod.kill()


def step(number: int) -> list[SequenceRequest]:
    """Samples of new prompts, with completions of any length."""
    draw = np.random.default_rng(number)
    return [
        SequenceRequest(
            prompt_token_ids=prompt,
            completion_token_ids=draw.integers(100, 400, draw.integers(20, 60)).tolist(),
        )
        for prompt in draw.integers(100, 400, (PROMPTS, PROMPT_TOKENS)).tolist()
        for _ in range(SAMPLES)
    ]


def assert_even(pods: Sequence[Pod]) -> None:
    """Compare the tokens of pods in one step, and their prompts with those of one replica."""
    prompts = sum(
        len({str(each["prompt_token_ids"]) for each in sequences})  # computed once in a request
        for pod in pods
        for sequences in pod.received
    )
    assert prompts <= 1.2 * PROMPTS
    tokens = [pod.pop_tokens() for pod in pods]
    mean = sum(tokens) / len(tokens)
    assert all(abs(each - mean) <= 0.15 * mean for each in tokens), tokens


def assert_same(scores: Sequence[TeacherScore], expected: Sequence[TeacherScore]) -> None:
    for left, right in zip(scores, expected, strict=True):
        assert left.completion.token_ids.tolist() == right.completion.token_ids.tolist()
        for name in ("token_logprobs", "logprobs", "tail_logprobs"):
            actual, reference = getattr(left.topk, name), getattr(right.topk, name)
            np.testing.assert_allclose(actual, reference, atol=2e-5, rtol=1e-5)


async def test_one_is_killed_and_one_added_while_a_client_scores(pods: list[Pod]) -> None:
    *first, added = pods
    survivors, victim = [*first[:2], first[3], added], first[2]
    addresses, later = [pod.address for pod in first], [0.0]

    async def resolve(host: str, port: int) -> list[str]:
        return addresses

    clock = Clock(now=lambda: time.monotonic() + later[0])
    url = f"http://127.0.0.5:{added.port}"
    async with TeacherClient("math", [url], verify=0) as single:
        expected = [await single.score(step(number), top_k=4) for number in range(9)]
    added.received.clear()

    name = f"dns+http://math:{added.port}"
    async with TeacherClient("math", [name], verify=0, resolve=resolve, clock=clock) as client:

        async def score(number: int) -> None:
            assert_same(await client.score(step(number), top_k=4), expected[number])

        for number in range(4):
            await score(number)
            assert_even(first)
        victim.stuck.set()
        call = asyncio.create_task(score(4))
        await asyncio.to_thread(victim.waiting.wait)
        await asyncio.to_thread(victim.kill)
        await call
        addresses[:] = [pod.address for pod in survivors]
        while {httpx.URL(each.url).host for each in client.replicas} != {*addresses}:
            later[0] += RENEW_SECONDS
            await score(5)  # and resolves the name meanwhile
        for pod in pods:
            pod.received.clear()
        for number in range(6, 9):
            await score(number)
            assert_even(survivors)
        counts = client.counters.replicas[f"http://{victim.address}:{victim.port}"]
        assert counts.failures >= 1
        assert client.counters.failures == 0
