"""What surrounds every request: its id, its log line, its metrics, and the end of the service."""

import asyncio
import json
import logging
import sys
from typing import Any

import httpx
import pytest

from mopd_protocol.codec import BINARY_MEDIA_TYPE
from mopd_server.app import create_app
from mopd_server.http.lifecycle import Lifecycle
from mopd_server.http.logs import FIELDS, JsonFormatter, TextFormatter
from mopd_server.http.middleware import response_limit as answer_limit
from mopd_server.http.middleware.body_limit import HELD_BODIES
from mopd_server.service_error import ServiceError
from tests.server.tiny_teachers import TinyTeacher, get, post, request_async, teacher_of_family

SMALL = {"sequences": [{"prompt_token_ids": [1, 2], "completion_token_ids": [3]}], "top_k": 1}


def test_a_sane_request_id_is_kept_and_every_answer_has_one(qwen_teacher: TinyTeacher) -> None:
    app = qwen_teacher.app
    mine = {"X-Request-Id": "run-1.step_2"}
    assert post(app, SMALL, mine).headers["x-request-id"] == "run-1.step_2"
    assert post(app, "{", mine).json()["instance"] == "run-1.step_2"
    made = {get(app, "/healthz").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    assert post(app, "{", {"X-Request-Id": "a b"}).json()["instance"] not in ("a b", "")


def test_an_unforeseen_error_is_logged_under_its_request(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*arguments: object, **options: object) -> None:
        raise KeyError("/opt/secret")

    app = qwen_teacher.app
    monkeypatch.setattr(qwen_teacher.service, "score", broken)
    formatter = JsonFormatter()
    lines: list[str] = []
    with caplog.at_level(logging.INFO, logger="mopd_server"):
        monkeypatch.setattr(
            caplog.handler, "emit", lambda record: lines.append(formatter.format(record))
        )
        answer = post(app, SMALL, {"X-Request-Id": "seven"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == answer.json()["instance"] == "seven"
    assert "secret" not in answer.text
    failed, refused = map(json.loads, lines)
    assert "KeyError: '/opt/secret'" in failed["exception"]
    assert refused["status"] == 500
    assert failed["request_id"] == refused["request_id"] == "seven"


def log_record(message: str, **fields: Any) -> logging.LogRecord:
    """What ``logger.info(message, extra={FIELDS: fields})`` hands to a formatter."""
    return logging.makeLogRecord(
        {"name": "n", "levelname": "INFO", "levelno": 20, "msg": message, FIELDS: fields}
    )


def test_a_json_line_is_one_line_of_json_whatever_it_holds() -> None:
    record = log_record('two\nlines and a "quote"', status=200, path=logging)
    try:
        raise ValueError("a\nb")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = JsonFormatter().format(record)
    assert "\n" not in line
    read = json.loads(line)
    assert (read["message"], read["status"]) == ('two\nlines and a "quote"', 200)
    assert "ValueError" in read["exception"]
    assert (
        TextFormatter().format(log_record("done", status=200, k=1)).endswith("done status=200 k=1")
    )


def test_metrics_tell_the_process_the_refusals_and_the_whole_time() -> None:
    teacher = teacher_of_family("qwen")
    app = create_app(teacher.service, api_keys=["one"])
    key = {"Authorization": "Bearer one"}
    assert post(app, SMALL, key).status_code == 200
    assert post(app, SMALL).status_code == 401
    assert post(app, {"sequences": []}, key).status_code == 400
    lines = get(app, "/metrics").text.splitlines()
    names = {line.split("{")[0].split(" ")[0] for line in lines}
    assert {"process_resident_memory_bytes", "process_open_fds", "mopd_build_info"} <= names
    assert "process_start_time_seconds" in names
    assert 'mopd_refused_requests_total{reason="unauthorized"} 1.0' in lines
    assert 'mopd_refused_requests_total{reason="malformed"} 1.0' in lines
    assert "mopd_request_seconds_count 1.0" in lines
    assert "mopd_requests_in_flight 0.0" in lines
    assert "mopd_ready 1.0" in lines
    assert len(lines) == len(set(lines)), "one registry repeats another"


def test_a_service_that_is_not_loaded_answers_probes_only() -> None:
    app = create_app(Lifecycle(), api_keys=["one"])
    key = {"Authorization": "Bearer one"}
    assert get(app, "/healthz").status_code == 200
    assert "mopd_ready 0.0" in get(app, "/metrics").text
    for answer in (
        get(app, "/readyz"),
        get(app, "/v1/manifest", key),
        get(app, "/docs"),
        post(app, SMALL, key),
    ):
        assert answer.status_code == 503
        assert "loading its model" in answer.json()["detail"]
        assert int(answer.headers["retry-after"]) >= 1
    assert post(app, SMALL).status_code == 401  # who has no key is not even told that


def test_a_drain_lets_nothing_in_and_says_when_the_last_answer_is_given(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle = Lifecycle(qwen_teacher.service)
    app = create_app(lifecycle)
    score = qwen_teacher.service.score
    idle: list[int] = []

    async def scenario() -> list[httpx.Response]:
        begun, let_go = asyncio.Event(), asyncio.Event()

        async def held(*arguments: Any, **options: Any) -> object:
            begun.set()
            await let_go.wait()
            return await score(*arguments, **options)

        monkeypatch.setattr(qwen_teacher.service, "score", held)
        accepted = asyncio.create_task(ask())
        await begun.wait()
        lifecycle.drain(lambda: idle.append(lifecycle.in_flight))
        refused, ready = await ask(), await request_async(app, "GET", "/readyz")
        assert idle == []
        let_go.set()
        return [await accepted, refused, ready, await request_async(app, "GET", "/healthz")]

    async def ask() -> httpx.Response:
        return await request_async(app, "POST", "/v1/logprobs", SMALL)

    accepted, refused, ready, alive = asyncio.run(scenario())
    assert [a.status_code for a in (accepted, refused, ready, alive)] == [200, 503, 503, 200]
    assert idle == [0]
    assert {a.headers["connection"] for a in (accepted, refused, ready, alive)} == {"close"}


def test_an_abandoned_service_answers_what_is_in_flight(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle = Lifecycle(qwen_teacher.service)
    app = create_app(lifecycle)
    cancelled: list[bool] = []

    async def scenario() -> httpx.Response:
        begun = asyncio.Event()

        async def hangs(*arguments: Any, **options: Any) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(True)

        monkeypatch.setattr(qwen_teacher.service, "score", hangs)
        asked = asyncio.create_task(request_async(app, "POST", "/v1/logprobs", SMALL))
        await begun.wait()
        lifecycle.abandon("engine_dead", "the engine of this teacher has died")
        return await asked

    answer = asyncio.run(scenario())
    assert (answer.status_code, answer.json()["detail"]) == (
        503,
        "the engine of this teacher has died",
    )
    assert cancelled == [True]
    assert "has died" in get(app, "/readyz").json()["detail"]

    async def late() -> None:
        with pytest.raises(ServiceError, match="has died"), lifecycle.ending():
            pytest.fail("a request that was let in before must not begin to wait")

    asyncio.run(late())


def test_bodies_that_are_held_are_bounded_together(qwen_teacher: TinyTeacher) -> None:
    """One body after the other is left unfinished; the one that is too many is told to wait."""
    limit = 100
    app = create_app(qwen_teacher.service, max_body_bytes=limit)

    async def unfinished(begun: asyncio.Event, over: asyncio.Event) -> None:
        messages = [{"type": "http.request", "body": b" " * limit, "more_body": True}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            begun.set()
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            """Nobody listens."""

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/logprobs", "query_string": b""}
        await app({**scope, "raw_path": b"/v1/logprobs", "headers": headers}, receive, send)

    async def scenario() -> list[httpx.Response]:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(HELD_BODIES):
                begun = asyncio.Event()
                group.create_task(unfinished(begun, over))
                await begun.wait()
            too_many = await request_async(app, "POST", "/v1/logprobs", SMALL)
            over.set()
        return [too_many, await request_async(app, "POST", "/v1/logprobs", SMALL)]

    too_many, later = asyncio.run(scenario())
    assert too_many.status_code == 503
    assert "fill the 1600 bytes" in too_many.json()["detail"]
    assert too_many.headers["retry-after"] == "1"
    assert later.status_code == 200


def test_answers_are_bounded_one_by_one_and_together(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_limit, "LARGEST_JSON_ANSWER", 3)
    monkeypatch.setattr(answer_limit, "LARGEST_BINARY_ANSWER", 5)
    monkeypatch.setattr(answer_limit, "HELD_ENTRIES", 7)
    app, binary = qwen_teacher.app, {"Accept": BINARY_MEDIA_TYPE}
    assert post(app, {**SMALL, "top_k": 3}).status_code == 200
    refused = post(app, {**SMALL, "top_k": 4})
    assert refused.status_code == 413
    assert "would have 4 entries" in refused.json()["detail"]
    assert "or for the binary answer" in refused.json()["detail"]
    assert post(app, {**SMALL, "top_k": 5}, binary).status_code == 200
    assert post(app, {**SMALL, "top_k": 6}, binary).status_code == 413
    score = qwen_teacher.service._scorer.score

    async def scenario() -> list[httpx.Response]:
        begun, let_go = asyncio.Event(), asyncio.Event()

        async def held(*arguments: Any, **options: Any) -> object:
            begun.set()
            await let_go.wait()
            return await score(*arguments, **options)

        monkeypatch.setattr(qwen_teacher.service._scorer, "score", held)
        first = asyncio.create_task(ask(5))
        await begun.wait()
        second = await ask(3)
        let_go.set()
        return [second, await first, await ask(3)]

    async def ask(k: int) -> httpx.Response:
        return await request_async(app, "POST", "/v1/logprobs", {**SMALL, "top_k": k}, binary)

    answers = asyncio.run(scenario())
    assert [answer.status_code for answer in answers] == [503, 200, 200]
    assert "5 entries of other answers" in answers[0].json()["detail"]
    assert answers[0].headers["retry-after"] == "1"
