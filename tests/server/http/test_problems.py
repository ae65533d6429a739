"""Tests of error responses: status, code, field and numbers."""

import asyncio
import re
import threading
from typing import Any

import httpx
import pytest

from mopd_protocol.request_tokenizer import RequestTokenizer
from mopd_protocol.requests import SequenceRequest
from mopd_server.app import create_app
from mopd_server.scoring.request_limits import LARGE_TEXT
from tests.server.tiny_teachers import (
    TinyTeacher,
    get,
    post,
    post_async,
    problem,
    request_async,
    send_raw,
    teacher_of_family,
)

SEQUENCE = {"prompt": "the quick", "completion": " fox"}
BODY = {"sequences": [SEQUENCE]}
MAX_SEQUENCES = 4096


@pytest.mark.parametrize(
    ("body", "field", "text"),
    [
        ({**BODY, "topk": 4}, "body", "'topk'"),
        (
            {"sequences": [{**SEQUENCE, "text": "a"}]},
            "sequences[0]",
            "id, messages, chat_template_kwargs",
        ),
        (
            {"sequences": [{"messages": [{"role": "user", "content": "", "label": "x"}]}]},
            "sequences[0].messages[0]",
            "role, content",
        ),
        (
            {
                "sequences": [
                    {
                        "messages": [
                            {
                                "role": "assistant",
                                "tool_calls": [
                                    {"function": {"name": "f", "arguments": {}, "x": 1}}
                                ],
                            }
                        ],
                        "completion": "",
                    }
                ]
            },
            "sequences[0].messages[0].tool_calls[0].function",
            "only name, arguments",
        ),
        (
            {"sequences": [SEQUENCE, {**SEQUENCE, "prompt_token_ids": [1]}]},
            "sequences[1]",
            "exactly one of messages, prompt, prompt_token_ids",
        ),
        (
            {"sequences": [{"prompt": "a"}]},
            "sequences[0]",
            "exactly one of completion, completion_token_ids",
        ),
        *(
            (
                {
                    "sequences": [
                        {
                            "messages": [{"role": "user", "content": "a"}],
                            "completion": "",
                            "chat_template_kwargs": {name: "a"},
                        }
                    ]
                },
                "sequences[0].chat_template_kwargs",
                name,
            )
            for name in ("self", "messages", "conversation", "tokenize", "tools")
        ),
        ({**BODY, "top_k": 0}, "top_k", "found 0"),
        ({**BODY, "temperature": 0}, "temperature", "found 0"),
        ({"top_k": 4}, "sequences", "found nothing"),
        ({"sequences": []}, "sequences", "found []"),
        (
            {"sequences": [{"prompt": "a", "completion": ""}] * (MAX_SEQUENCES + 1)},
            "sequences",
            f"at most {MAX_SEQUENCES}",
        ),
        (
            {"sequences": [{"prompt_token_ids": [-1], "completion": ""}]},
            "sequences[0].prompt_token_ids[0]",
            "found -1",
        ),
        ("{", "body", "invalid JSON"),
    ],
)
def test_malformed_body_is_a_400_with_fields(
    qwen_teacher: TinyTeacher, body: Any, field: str, text: str
) -> None:
    document = problem(post(qwen_teacher.app, body), 400, "malformed")
    assert document["detail"].startswith(f"{field}: ")
    assert text in document["detail"]
    assert document["errors"][0]["field"] == field
    assert all(set(error) == {"field", "found", "expected"} for error in document["errors"])


def test_wrong_content_type_is_a_400_with_the_header(qwen_teacher: TinyTeacher) -> None:
    response = post(qwen_teacher.app, '{"sequences": []}', {"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in problem(response, 400, "malformed")["detail"]


@pytest.mark.parametrize(
    ("body", "field", "numbers"),
    [
        ({**BODY, "top_k": 421}, "top_k", ["421", "420"]),
        ({**BODY, "temperature": 1e-9}, "temperature", ["1e-09", "0.01 to 100"]),
        (
            {"sequences": [SEQUENCE, {"prompt_token_ids": [99999], "completion": ""}]},
            "sequences[1]: prompt_token_ids",
            ["99999", "420"],
        ),
        ({"sequences": [SEQUENCE, {"prompt": "", "completion": "a"}]}, "sequences[1]: prompt", []),
    ],
)
def test_value_outside_the_limits_of_the_teacher_is_a_400(
    qwen_teacher: TinyTeacher, body: dict[str, Any], field: str, numbers: list[str]
) -> None:
    detail = problem(post(qwen_teacher.app, body), 400, "malformed")["detail"]
    assert detail.startswith(f"{field}: ")
    assert all(number in detail for number in numbers)


def test_unknown_control_token_is_a_422(qwen_teacher: TinyTeacher) -> None:
    sequence = {"prompt": "a", "completion": [{"control": "<x>"}]}
    response = post(qwen_teacher.app, {"sequences": [SEQUENCE, sequence]})
    detail = problem(response, 422, "unprocessable_entity")["detail"]
    assert detail.startswith("sequences[1]: completion: ")
    assert "'<x>'" in detail


def test_longest_sequence_is_scored_and_a_longer_one_is_a_413(qwen_teacher: TinyTeacher) -> None:
    sequence = {"prompt_token_ids": [1] * 250, "completion_token_ids": [2] * 6}
    longer = {**sequence, "completion_token_ids": [2] * 7}
    assert post(qwen_teacher.app, {"sequences": [sequence]}).status_code == 200
    response = post(qwen_teacher.app, {"sequences": [SEQUENCE, longer]})
    detail = problem(response, 413, "too_large")["detail"]
    assert detail.startswith("sequences[1]: ")
    assert all(number in detail for number in ("257", "250", "7", "256"))


def test_too_many_candidates_are_a_400() -> None:
    app = teacher_of_family("qwen", top_k_max=2).app
    body = {"sequences": [{**SEQUENCE, "candidate_ids": [[1, 2, 3]]}], "top_k": 1}
    detail = problem(post(app, body), 400, "malformed")["detail"]
    assert detail.startswith("sequences[0].candidate_ids: found 3")


def test_unknown_path_and_method(qwen_teacher: TinyTeacher) -> None:
    app = qwen_teacher.app
    assert "/docs" in problem(get(app, "/v2/logprobs"), 404, "not_found")["detail"]
    response = get(app, "/v1/logprobs")
    assert "POST" in problem(response, 405, "method_not_allowed")["detail"]
    assert response.headers["allow"] == "POST"
    slash = asyncio.run(request_async(app, "POST", "/v1/logprobs/", {}))
    assert "/v1/logprobs/" in problem(slash, 404, "not_found")["detail"]


def test_large_body_is_a_413_with_and_without_content_length(qwen_teacher: TinyTeacher) -> None:
    app = create_app(qwen_teacher.service, max_body_bytes=100)
    detail = problem(post(app, "x" * 101), 413, "too_large")["detail"]
    assert "101 bytes" in detail
    assert "100" in detail

    async def chunked() -> httpx.Response:
        async def chunks():
            for _ in range(11):
                yield b" " * 10

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            headers = {"Content-Type": "application/json"}
            return await client.post("/v1/logprobs", content=chunks(), headers=headers)

    assert "100" in problem(asyncio.run(chunked()), 413, "too_large")["detail"]
    problem(post(app, "x" * 100), 400, "malformed")


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "Basic right", "Bearer righ"])
def test_request_without_a_valid_key_is_a_401(
    qwen_teacher: TinyTeacher, header: str | None
) -> None:
    app = create_app(qwen_teacher.service, api_keys=["other", "right"])
    headers = {"Authorization": header} if header else {}
    for response in (
        post(app, BODY, headers),
        get(app, "/v1/manifest", headers),
        get(app, "/v1/tokenizer", headers),
    ):
        detail = problem(response, 401, "unauthorized")["detail"]
        assert "Authorization: Bearer KEY" in detail
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/healthz", "/readyz", "/metrics"):
        assert get(app, path, headers).status_code == 200


@pytest.mark.parametrize("key", ["other", "right"])
def test_request_with_a_valid_key_is_scored(qwen_teacher: TinyTeacher, key: str) -> None:
    app = create_app(qwen_teacher.service, api_keys=["other", "right"])
    assert post(app, BODY, {"Authorization": f"Bearer {key}"}).status_code == 200


def test_teacher_is_not_ready_before_its_warm_up() -> None:
    teacher = teacher_of_family("qwen", warm=False)
    app = teacher.app
    for response in (get(app, "/readyz"), post(app, BODY)):
        problem(response, 503, "warming_up")
        assert int(response.headers["retry-after"]) >= 1
    assert "math" not in get(app, "/readyz").text  # needs no key
    assert get(app, "/healthz").status_code == 200
    heads = [asyncio.run(request_async(app, "HEAD", path)) for path in ("/healthz", "/readyz")]
    assert [head.status_code for head in heads] == [200, 503]
    teacher.service.warm_up()
    assert get(app, "/readyz").json() == {"status": "ready"}
    assert asyncio.run(request_async(app, "HEAD", "/readyz")).status_code == 200
    assert post(app, BODY).status_code == 200


def test_lifespan_of_the_application_warms_up_the_service() -> None:
    app = teacher_of_family("qwen", warm=False).app

    async def scenario() -> int:
        async with app.router.lifespan_context(app):
            while (response := await request_async(app, "GET", "/readyz")).status_code == 503:
                await asyncio.sleep(0)
            return response.status_code

    assert asyncio.run(scenario()) == 200


def fail(*arguments: object, **options: object) -> None:
    raise RuntimeError("out of memory in /opt/models/secret/model.py")


def test_failed_warm_up_is_unhealthy_without_private_details(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher = teacher_of_family("qwen", warm=False)
    monkeypatch.setattr(teacher.engine, "score", fail)
    teacher.service.warm_up()
    for path in ("/readyz", "/healthz"):
        response = get(teacher.app, path)
        problem(response, 503, "failed")
        assert not re.search("memory|secret|math", response.text)


@pytest.mark.parametrize(
    ("owner", "method", "code"),
    [("engine", "score", "engine_failed"), ("tokenizer", "tokenize", "internal_server_error")],
)
def test_unexpected_error_is_a_500_and_the_next_request_is_scored(
    owner: str, method: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = teacher_of_family("qwen")
    with monkeypatch.context() as patch:
        patch.setattr(type(getattr(teacher, owner)), method, fail)
        response = post(teacher.app, BODY)
        assert "RuntimeError" in problem(response, 500, code)["detail"]
        assert not re.search("secret|opt|Traceback", response.text)
    assert post(teacher.app, BODY).status_code == 200


class BlockedEngine:
    """Blocks the engine of a teacher until ``gate`` is set."""

    def __init__(self, teacher: TinyTeacher, patch: pytest.MonkeyPatch) -> None:
        self.started, self.gate = threading.Event(), threading.Event()
        self._score = teacher.engine.score
        patch.setattr(teacher.engine, "score", self._blocked)

    def _blocked(self, *arguments: Any, **options: Any) -> Any:
        self.started.set()
        assert self.gate.wait(timeout=300), "the gate is closed after a failed test"
        return self._score(*arguments, **options)


async def wait_until_queued(app: Any) -> None:
    while "mopd_queue_sequences 1.0" not in (await request_async(app, "GET", "/metrics")).text:
        await asyncio.sleep(0)


def test_full_queue_is_a_429_with_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teacher_of_family("qwen", max_queue_tokens=1)
    app, engine = teacher.app, BlockedEngine(teacher, monkeypatch)

    async def scenario() -> list[httpx.Response]:
        first = asyncio.create_task(post_async(app, BODY))
        await asyncio.to_thread(engine.started.wait)
        second = asyncio.create_task(post_async(app, BODY))
        await wait_until_queued(app)
        third = await post_async(app, BODY)
        engine.gate.set()
        return [await first, await second, third]

    *scored, rejected = asyncio.run(scenario())
    assert [response.status_code for response in scored] == [200, 200]
    problem(rejected, 429, "queue_full")
    assert int(rejected.headers["retry-after"]) >= 1


def test_slow_request_is_a_504(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teacher_of_family("qwen")
    app = create_app(teacher.service, request_timeout_seconds=0)
    engine = BlockedEngine(teacher, monkeypatch)
    response = post(app, BODY)
    engine.gate.set()
    assert "0 s" in problem(response, 504, "deadline")["detail"]


@pytest.mark.parametrize("cancelled", [False, True])
def test_request_of_a_disconnected_client_leaves_the_queue(
    monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """Most servers send a message; Ray Serve cancels the request."""
    teacher = teacher_of_family("qwen")
    app, engine = teacher.app, BlockedEngine(teacher, monkeypatch)

    async def scenario() -> str:
        first = asyncio.create_task(post_async(app, BODY))
        await asyncio.to_thread(engine.started.wait)
        disconnect = asyncio.Event()
        body = b'{"sequences": [{"prompt": "a", "completion": "b"}]}'
        second = asyncio.create_task(send_raw(app, body, asyncio.Event(), disconnect))
        await wait_until_queued(app)
        if cancelled:
            second.cancel()
        disconnect.set()
        await asyncio.gather(second, return_exceptions=True)
        metrics = await request_async(app, "GET", "/metrics")
        engine.gate.set()
        assert (await first).status_code == 200
        return metrics.text

    metrics = asyncio.run(scenario())
    assert "mopd_queue_sequences 0.0" in metrics
    assert 'mopd_requests_total{path="/v1/logprobs",status="499"} 1.0' in metrics


@pytest.mark.parametrize("field", ["prompt", "messages", "completion"])
def test_probes_get_responses_while_megabytes_are_tokenized(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    teacher = teacher_of_family("qwen")
    tokenize, text = teacher.tokenizer.tokenize, "a" * 2**20
    value = [{"role": "user", "content": text}] if field == "messages" else text
    sequence = {**SEQUENCE, field: value}
    if field == "messages":
        del sequence["prompt"]
    probed = threading.Event()

    async def scenario() -> httpx.Response:
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def blocked(_: Any, *arguments: Any, **options: Any) -> Any:
            loop.call_soon_threadsafe(started.set)
            assert probed.wait(timeout=300), "tokenization runs on the event loop"
            return tokenize(*arguments, **options)

        monkeypatch.setattr(RequestTokenizer, "tokenize", blocked)
        request = asyncio.create_task(post_async(teacher.app, {"sequences": [sequence]}))
        waiting = asyncio.create_task(started.wait())
        await asyncio.wait({request, waiting}, return_when=asyncio.FIRST_COMPLETED)
        assert not request.done()
        for _ in range(15):
            assert (await request_async(teacher.app, "GET", "/healthz")).status_code == 200
        probed.set()
        return await request

    problem(asyncio.run(scenario()), 413, "too_large")


def test_large_texts_are_tokenized_sequentially_and_do_not_delay_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher = teacher_of_family("qwen")
    tokenize, gate = teacher.tokenizer.tokenize, threading.Event()
    started: list[str] = []

    def blocked(_: Any, sequence: SequenceRequest, **options: Any) -> Any:
        started.append(sequence.id or "")
        if sequence.id != "small":
            assert gate.wait(timeout=300), "the gate is closed after a failed test"
        return tokenize(sequence, **options)

    monkeypatch.setattr(RequestTokenizer, "tokenize", blocked)

    async def scenario() -> list[httpx.Response]:
        def request(name: str, **fields: Any) -> "asyncio.Task[httpx.Response]":
            body = {"sequences": [{**SEQUENCE, "id": name, **fields}]}
            return asyncio.create_task(post_async(teacher.app, body))

        half = "a" * (LARGE_TEXT // 2)
        large = [request("first", prompt="a" + half + half)]
        while not started:
            await asyncio.sleep(0)
        parts = ["a" + half, {"control": "<|end|>"}]
        large.append(request("second", prompt=half, completion=parts))
        for _ in range(3):
            assert (await request("small")).status_code == 200
        assert started == ["first", "small", "small", "small"]
        gate.set()
        return [await response for response in large]

    for response in asyncio.run(scenario()):
        problem(response, 413, "too_large")
