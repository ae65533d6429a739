"""Tests of request ids, logs, metrics, lifecycle, and the memory limits of all requests."""

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from mopd_protocol.codec import BINARY_MEDIA_TYPE
from mopd_protocol.requests import body_hash
from mopd_server import app as application
from mopd_server.app import create_app
from mopd_server.http import request_body
from mopd_server.http.lifecycle import Lifecycle
from mopd_server.http.logs import FIELDS, JsonFormatter, TextFormatter
from mopd_server.http.middleware import response_limit
from mopd_server.http.middleware.body_limit import CONCURRENT_BODIES
from mopd_server.http.request_body import LARGE_BYTES
from mopd_server.http.request_record import current_record
from mopd_server.service_error import ServiceError
from tests.server.tiny_teachers import (
    SMALL,
    TinyTeacher,
    get,
    post,
    post_async,
    problem,
    request_async,
    send_raw,
    teacher_of_family,
)


class Gate:
    """Blocks a function until it is opened; create inside the event loop."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.started, self._open = asyncio.Event(), asyncio.Event()
        self._function = function
        self.cancelled = False

    async def __call__(self, *arguments: Any, **options: Any) -> object:
        self.started.set()
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return await self._function(*arguments, **options)

    def open(self) -> None:
        self._open.set()


def test_safe_request_id_is_kept_and_every_response_has_one(qwen_teacher: TinyTeacher) -> None:
    app = qwen_teacher.app
    header = {"X-Request-Id": "run-1.step_2"}
    assert post(app, SMALL, header).headers["x-request-id"] == "run-1.step_2"
    assert post(app, "{", header).json()["instance"] == "run-1.step_2"
    assert len({get(app, "/healthz").headers["x-request-id"] for _ in range(3)}) == 3
    assert post(app, "{", {"X-Request-Id": "a b"}).json()["instance"] not in ("a b", "")


def test_unexpected_error_is_logged_with_its_request_id(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*arguments: object, **options: object) -> None:
        raise KeyError("/opt/secret")

    monkeypatch.setattr(qwen_teacher.service, "score", fail)
    formatter = JsonFormatter()
    lines: list[str] = []
    with caplog.at_level(logging.INFO, logger="mopd_server"):
        monkeypatch.setattr(
            caplog.handler, "emit", lambda record: lines.append(formatter.format(record))
        )
        response = post(qwen_teacher.app, SMALL, {"X-Request-Id": "seven"})
    document = problem(response, 500, "internal_server_error")
    assert response.headers["x-request-id"] == document["instance"] == "seven"
    assert "secret" not in response.text
    error, request = map(json.loads, lines)
    assert "KeyError: '/opt/secret'" in error["exception"]
    assert (request["status"], request["reason"]) == (500, "internal_server_error")
    assert error["request_id"] == request["request_id"] == "seven"


def log_record(message: str, **fields: Any) -> logging.LogRecord:
    """Return the record of ``logger.info(message, extra={FIELDS: fields})``."""
    return logging.makeLogRecord(
        {"name": "n", "levelname": "INFO", "levelno": 20, "msg": message, FIELDS: fields}
    )


@pytest.mark.parametrize("padding", [1, LARGE_BYTES + 1])
def test_work_in_threads_has_the_request_id(
    padding: int, qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies are on either side of the size above which a thread parses them."""
    seen: list[tuple[str, bool]] = []

    def observed(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            record, thread = current_record(), threading.current_thread()
            seen.append((record.id if record else "", thread is threading.main_thread()))
            return work(*arguments, **options)

        return call

    for owner, name in (
        (request_body, "parse"),
        (request_body, "parse_in_parts"),
        (type(qwen_teacher.service), "_tokenize"),
        (application, "encode_json"),
    ):
        monkeypatch.setattr(owner, name, observed(getattr(owner, name)))
    body = {**SMALL, "sequences": [{**SMALL["sequences"][0], "id": "x" * padding}]}
    response = post(qwen_teacher.app, body, {"X-Request-Id": "seven"})
    assert response.headers["mopd-request"] == body_hash(json.dumps(body).encode())
    parsed_here = padding <= LARGE_BYTES
    assert seen == [("seven", parsed_here), ("seven", False), ("seven", False)]


def test_json_log_is_one_line_for_any_message() -> None:
    record = log_record('two\nlines and a "quote"', status=200, path=logging)
    try:
        raise ValueError("a\nb")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = JsonFormatter().format(record)
    assert "\n" not in line
    parsed = json.loads(line)
    assert (parsed["message"], parsed["status"]) == ('two\nlines and a "quote"', 200)
    assert "ValueError" in parsed["exception"]
    text = TextFormatter().format(log_record("done", status=200, k=1))
    assert text.endswith("done status=200 k=1")


def test_metrics_count_requests_tokens_phases_and_errors() -> None:
    app = create_app(teacher_of_family("qwen").service, api_keys=["one"])
    key = {"Authorization": "Bearer one"}
    body = {"sequences": [{"prompt_token_ids": [4, 5, 6], "completion_token_ids": [7, 8]}]}
    for request, headers, status in (
        ({**body, "top_k": 1}, key, 200), (SMALL, {}, 401), ({"sequences": []}, key, 400),
    ):  # fmt: skip
        assert post(app, request, headers).status_code == status
    assert get(app, "/wp-login.php").status_code == 404
    lines = get(app, "/metrics").text.splitlines()
    names = {line.split("{")[0].split(" ")[0] for line in lines}
    assert {"process_resident_memory_bytes", "process_open_fds", "mopd_build_info"} <= names
    assert "process_start_time_seconds" in names
    assert {
        'mopd_requests_total{path="/v1/logprobs",status="200"} 1.0',
        'mopd_requests_total{path="/v1/logprobs",status="400"} 1.0',
        'mopd_requests_total{path="other",status="404"} 1.0',
        'mopd_request_errors_total{reason="unauthorized"} 1.0',
        'mopd_request_errors_total{reason="malformed"} 1.0',
        "mopd_tokens_scored_total 2.0",
        "mopd_prompt_tokens_total 3.0",
        "mopd_queue_sequences 0.0",
        "mopd_request_seconds_count 1.0",
        "mopd_requests_in_flight 0.0",
        "mopd_ready 1.0",
        *(
            f'mopd_phase_seconds_count{{phase="{phase}"}} 1.0'
            for phase in ("tokenize", "queue", "prefill", "encode")
        ),
    } <= {*lines}
    assert len(lines) == len(set(lines)), "a metric is in both registries"


def test_loading_service_responds_to_probes_only() -> None:
    app = create_app(Lifecycle(), api_keys=["one"])
    key = {"Authorization": "Bearer one"}
    assert get(app, "/healthz").status_code == 200
    assert "mopd_ready 0.0" in get(app, "/metrics").text
    for response in (
        get(app, "/readyz"),
        get(app, "/v1/manifest", key),
        get(app, "/docs"),
        post(app, SMALL, key),
    ):
        problem(response, 503, "loading")
        assert int(response.headers["retry-after"]) >= 1
    problem(post(app, SMALL), 401, "unauthorized")


def test_drain_accepts_no_request_and_reports_the_last_response(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle = Lifecycle(qwen_teacher.service)
    app = create_app(lifecycle)
    idle: list[int] = []

    async def scenario() -> list[httpx.Response]:
        gate = Gate(qwen_teacher.service.score)
        monkeypatch.setattr(qwen_teacher.service, "score", gate)
        accepted = asyncio.create_task(post_async(app, SMALL))
        await gate.started.wait()
        lifecycle.drain(lambda: idle.append(lifecycle.in_flight))
        rejected = [await post_async(app, SMALL), await request_async(app, "GET", "/readyz")]
        assert idle == []
        gate.open()
        return [*rejected, await accepted, await request_async(app, "GET", "/healthz")]

    responses = asyncio.run(scenario())
    for response in responses[:2]:
        problem(response, 503, "draining")
    assert [response.status_code for response in responses[2:]] == [200, 200]
    assert idle == [0]
    assert {response.headers["connection"] for response in responses} == {"close"}


def test_abort_ends_requests_in_flight_with_503(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle = Lifecycle(qwen_teacher.service)
    app = create_app(lifecycle)

    async def scenario() -> httpx.Response:
        gate = Gate(qwen_teacher.service.score)
        monkeypatch.setattr(qwen_teacher.service, "score", gate)
        request = asyncio.create_task(post_async(app, SMALL))
        await gate.started.wait()
        lifecycle.abort("engine_dead")
        response = await request
        assert gate.cancelled
        return response

    problem(asyncio.run(scenario()), 503, "engine_dead")
    problem(get(app, "/readyz"), 503, "engine_dead")

    async def late() -> None:
        with pytest.raises(ServiceError) as caught, lifecycle.abort_signal():
            pytest.fail("a request accepted before the abort starts to wait")
        assert caught.value.code == "engine_dead"

    asyncio.run(late())


def test_bodies_of_all_requests_are_limited_together(qwen_teacher: TinyTeacher) -> None:
    app = create_app(qwen_teacher.service, max_body_bytes=100)

    async def scenario() -> list[httpx.Response]:
        disconnect = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENT_BODIES):
                sent = asyncio.Event()
                group.create_task(send_raw(app, b" " * 100, sent, disconnect, more_body=True))
                await sent.wait()
            rejected = await post_async(app, SMALL)
            disconnect.set()
        return [rejected, await post_async(app, SMALL)]

    rejected, later = asyncio.run(scenario())
    assert "1600 bytes" in problem(rejected, 503, "bodies")["detail"]
    assert rejected.headers["retry-after"] == "1"
    assert later.status_code == 200


def test_entries_of_responses_are_limited_each_and_together(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_limit, "MAX_JSON_ENTRIES", 3)
    monkeypatch.setattr(response_limit, "MAX_BINARY_ENTRIES", 5)
    monkeypatch.setattr(response_limit, "MAX_TOTAL_ENTRIES", 7)
    app, binary = qwen_teacher.app, {"Accept": BINARY_MEDIA_TYPE}
    for headers, limit in (({}, 3), (binary, 5)):
        assert post(app, {**SMALL, "top_k": limit}, headers).status_code == 200
        rejected = post(app, {**SMALL, "top_k": limit + 1}, headers)
        assert f"found {limit + 1} entries" in problem(rejected, 413, "too_large")["detail"]

    async def request(k: int) -> httpx.Response:
        return await post_async(app, {**SMALL, "top_k": k}, binary)

    async def scenario() -> list[httpx.Response]:
        gate = Gate(qwen_teacher.service._scorer.score)
        monkeypatch.setattr(qwen_teacher.service._scorer, "score", gate)
        first = asyncio.create_task(request(5))
        await gate.started.wait()
        second = await request(3)
        gate.open()
        return [second, await first, await request(3)]

    rejected, *accepted = asyncio.run(scenario())
    assert "found 5 entries" in problem(rejected, 503, "responses")["detail"]
    assert rejected.headers["retry-after"] == "1"
    assert [response.status_code for response in accepted] == [200, 200]
