"""Malformed and malicious requests: each is rejected with an error, and the service continues."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.survival.running_teacher import PATIENCE_SECONDS, RunningTeacher, running_teacher

pytestmark = pytest.mark.process

GOOD = {"sequences": [{"prompt": "the quick", "completion": " fox"}], "top_k": 2}
MIB = 2**20
JSON_HEADERS = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def teacher(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningTeacher]:
    """One process for all requests; the time limit of a body is many times what those need."""
    log = tmp_path_factory.mktemp("hostile") / "log"
    with running_teacher(model_folder, log, "--body-timeout", "10") as running:
        yield running
        assert running.stop() == 0
    assert "Traceback" not in log.read_text()


@pytest.fixture(autouse=True)
def unharmed(teacher: RunningTeacher) -> Iterator[None]:
    """Check after each test that a valid request succeeds and that no request remains queued."""
    yield
    response = post(teacher, json.dumps(GOOD).encode())
    assert response.status_code == 200, response.text
    teacher.until_metric("mopd_requests_in_flight", 0)
    assert teacher.metric("mopd_queue_tokens") == 0


def post(teacher: RunningTeacher, body: bytes, **headers: str) -> httpx.Response:
    """Send exactly these bytes as a scoring request."""
    return httpx.post(
        f"{teacher.url}/v1/logprobs",
        content=body,
        headers={**JSON_HEADERS, **headers},
        timeout=PATIENCE_SECONDS,
    )


def refused(response: httpx.Response, status: int) -> str:
    """The detail of a problem document, which must have this status and contain no secret."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    assert problem["instance"] == response.headers["x-request-id"]
    assert "Traceback" not in response.text
    assert ".py" not in response.text
    assert "secret-qwen" not in response.text
    assert len(response.text) < 10_000
    return problem["detail"]


def sequence(**fields: Any) -> bytes:
    """A request for one sequence."""
    fields_sent = {"prompt": "the quick", "completion": " fox", **fields}
    kept = {name: value for name, value in fields_sent.items() if value is not None}
    return json.dumps({"sequences": [kept], "top_k": 2}).encode()


def request(**fields: Any) -> bytes:
    """An ordinary request but for ``fields``."""
    return json.dumps({**GOOD, **fields}).encode()


#: Name -> body, expected status, and what the detail has to mention.
REFUSED = {
    "no body": (b"", 400, ""),
    "invalid UTF-8": (b'{"sequences": [{"prompt": "\xff\xfe"}]}', 400, ""),
    "half a character pair": (b'{"sequences": [{"prompt": "\\ud800"}]}', 400, ""),
    "another encoding": (json.dumps(GOOD).encode("utf-16"), 400, ""),
    "deep": (b"[" * 100_000, 400, ""),
    "a number of a million digits": (b'{"top_k": ' + b"9" * MIB + b"}", 413, ""),
    "not a number": (b'{"sequences": [{}], "temperature": NaN}', 400, ""),
    "infinitely hot": (request(temperature=1).replace(b": 1}", b": 1e999}"), 400, "temperature"),
    "an array": (b"[]", 400, ""),
    "null": (b"null", 400, ""),
    "no k": (request(top_k=0), 400, "top_k"),
    "negative k": (request(top_k=-1), 400, "top_k"),
    "a billion k": (request(top_k=10**9), 400, "1000000000"),
    "k beyond 64 bits": (request(top_k=10**30), 400, "top_k"),
    "no sequences": (request(sequences=[]), 400, "sequences"),
    "no messages": (sequence(prompt=None, messages=[]), 400, "messages"),
    "no tokens": (sequence(prompt=None, prompt_token_ids=[]), 400, "prompt"),
    "id beyond the vocabulary": (
        sequence(prompt=None, prompt_token_ids=[10**6]),
        400,
        "found 1000000",
    ),
    "id beyond 32 bits": (sequence(prompt=None, prompt_token_ids=[2**40]), 400, "id"),
    "id beyond 64 bits": (sequence(prompt=None, prompt_token_ids=[2**70]), 400, "id"),
    "completion id beyond 32 bits": (
        sequence(completion=None, completion_token_ids=[2**40]),
        400,
        "id",
    ),
    "candidate beyond 32 bits": (sequence(candidate_ids=[[2**40], [1]]), 400, "candidate"),
    "candidates for other rows": (sequence(candidate_ids=[[1]] * 99), 400, "candidate_ids"),
    "a word of a million characters": (sequence(completion="a" * 10**6), 413, ""),
    "a million unknown control characters": (sequence(completion="\x01" * 10**6), 413, ""),
    "an unknown control token": (
        sequence(completion=[{"control": "<" + "x" * 10**6}]),
        422,
        "control token not found",
    ),
    "two million mistakes in ids": (
        b'{"sequences":[{"prompt":"a","completion_token_ids":[' + b"-1," * 2_000_000 + b"-1]}]}",
        400,
        "-1",
    ),
    "two million mistakes in text": (
        b'{"sequences":[{"prompt":"a","completion":[' + b"1," * 2_000_000 + b"1]}]}",
        400,
        "completion",
    ),
    "a million unknown keys": (
        b"{" + b",".join(b'"k%07d":1' % key for key in range(1_000_000)) + b"}",
        413,
        "strings",
    ),
    "a key of a million characters": (
        b'{"' + b"k" * MIB + b'": 1, "sequences": []}',
        400,
        "the unknown key",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_malformed_body_is_rejected_with_an_error(teacher: RunningTeacher, name: str) -> None:
    body, status, mentioned = REFUSED[name]
    memory = teacher.resident_mebibytes()
    assert mentioned in refused(post(teacher, body), status)
    assert teacher.resident_mebibytes() < memory + 600


@pytest.mark.parametrize("text", ["\x00", "a\x00b", "\ufffe", "\u202e", "🏳️‍🌈", "\r\n" * 100])
def test_any_unicode_text_is_scored(teacher: RunningTeacher, text: str) -> None:
    response = post(teacher, sequence(completion=text))
    assert response.status_code == 200, response.text
    assert response.json()["sequences"][0]["text"] == text


@pytest.mark.parametrize("role", ["wizard", "", "assistant\x00", "r" * 10**6])
def test_an_unknown_role_is_no_server_error(teacher: RunningTeacher, role: str) -> None:
    response = post(teacher, sequence(prompt=None, messages=[{"role": role, "content": "hello"}]))
    assert response.status_code in (200, 400, 413, 422), response.text


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/octet-stream", "json"])
def test_another_content_type_is_rejected_with_the_expected_one(
    teacher: RunningTeacher, content_type: str
) -> None:
    response = post(teacher, json.dumps(GOOD).encode(), **{"Content-Type": content_type})
    assert "Content-Type: application/json" in refused(response, 400)


@pytest.mark.parametrize("name", ["x" * 200, "a b", "../../etc/passwd", "é", "-leading"])
def test_a_harmful_request_id_is_replaced(teacher: RunningTeacher, name: str) -> None:
    header = {b"X-Request-Id": name.encode()}
    response = httpx.get(f"{teacher.url}/nowhere", headers=header, timeout=PATIENCE_SECONDS)
    assert refused(response, 404)
    assert response.headers["x-request-id"] != name
    assert response.headers["x-request-id"].isalnum()


def connected(teacher: RunningTeacher) -> socket.socket:
    """A bare connection."""
    url = httpx.URL(teacher.url)
    return socket.create_connection((url.host, url.port), timeout=PATIENCE_SECONDS)


def head(length: int | None, *more: str) -> bytes:
    """The head of a scoring request with a body of so many bytes, or in chunks."""
    body = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = ["POST /v1/logprobs HTTP/1.1", "Host: teacher", "Content-Type: application/json", body]
    return "\r\n".join([*lines, *more, "", ""]).encode()


def status_of(connection: socket.socket) -> int:
    """The status of the next response."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(65536)
        assert piece, f"closed after {received!r}"
        received += piece
    return int(received.split()[1])


def test_an_endless_body_times_out(teacher: RunningTeacher) -> None:
    slow = 'mopd_request_errors_total{reason="slow_body"}'
    before = teacher.metric(slow)
    with connected(teacher) as announced, connected(teacher) as chunked:
        announced.sendall(head(1000) + b'{"sequences"')
        chunked.sendall(head(None) + b"1\r\n{\r\n")
        assert status_of(announced) == 408
        assert status_of(chunked) == 408
    assert teacher.metric(slow) == before + 2


def test_a_gigabyte_is_refused_before_it_is_read(teacher: RunningTeacher, full_size: bool) -> None:
    memory = teacher.resident_mebibytes()
    with connected(teacher) as announced:
        announced.sendall(head(2**30))
        assert status_of(announced) == 413
    sent, piece = 0, b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with connected(teacher) as chunked:
        chunked.sendall(head(None))
        try:
            while sent < (2**30 if full_size else 64 * MIB):
                chunked.sendall(piece)
                sent += 0x10000
            assert status_of(chunked) == 413
        except ConnectionError:  # cut off while it was sending on
            assert sent > 16 * MIB
    assert teacher.resident_mebibytes() < memory + 100


def test_bodies_of_many_connections_do_not_fill_the_memory(teacher: RunningTeacher) -> None:
    """Together they announce more than the teacher buffers: those beyond are rejected."""
    each = 15 * MIB
    connections = [connected(teacher) for _ in range(24)]
    before = teacher.resident_mebibytes()
    statuses: list[int] = []
    try:
        for connection in connections:
            connection.sendall(head(each))
        for connection in connections:
            try:
                connection.sendall(b" " * (each - 1))
            except ConnectionError:
                continue
        for connection in connections:
            try:
                statuses.append(status_of(connection))
            except (AssertionError, ConnectionError):
                continue  # cut off while it was sending on
    finally:
        for connection in connections:
            connection.close()
    assert set(statuses) <= {408, 503}
    assert teacher.resident_mebibytes() < before + 600


def test_requests_of_a_disconnected_client_are_cancelled(teacher: RunningTeacher) -> None:
    disconnected = "mopd_cancelled_requests_total"
    before, scored = teacher.metric(disconnected), teacher.metric("mopd_tokens_scored_total")
    body = json.dumps(
        {"sequences": [{"prompt": "a", "completion": " fox" * 400}] * 500, "top_k": 1}
    ).encode()
    with connected(teacher) as connection:
        connection.sendall(head(len(body)) + body)
        teacher.until_metric("mopd_requests_in_flight", 1)
    teacher.until_metric(disconnected, before + 1)
    teacher.until_metric("mopd_queue_sequences", 0)
    assert teacher.metric("mopd_tokens_scored_total") == scored


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_failure(
    teacher: RunningTeacher,
) -> None:
    disconnected = "mopd_cancelled_requests_total"
    failed = 'mopd_requests_total{path="/v1/logprobs",status="500"}'
    before, failures = teacher.metric(disconnected), teacher.metric(failed)
    with connected(teacher) as connection:
        connection.sendall(head(1000) + b'{"sequences"')
        teacher.until_metric("mopd_requests_in_flight", 1)
    teacher.until_metric(disconnected, before + 1)
    assert teacher.metric(failed) == failures


@pytest.mark.parametrize(
    "text",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS handshake
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x00" * 100_000,
        b"POST /v1/logprobs HTTP/1.1\r\nHost: t\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/logprobs HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/logprobs HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: t\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_ends_the_connection(teacher: RunningTeacher, text: bytes) -> None:
    with connected(teacher) as connection:
        try:
            connection.sendall(text)
            response = connection.recv(65536)
        except ConnectionError:
            return
    assert not response or response.startswith(b"HTTP/1.1 4"), response


def test_hundreds_of_idle_connections_block_no_request(teacher: RunningTeacher) -> None:
    silent = [connected(teacher) for _ in range(300)]
    try:
        assert post(teacher, json.dumps(GOOD).encode()).status_code == 200
    finally:
        for connection in silent:
            connection.close()


def test_all_of_this_at_once_is_no_worse(teacher: RunningTeacher) -> None:
    async def request_scores(client: httpx.AsyncClient, name: str) -> None:
        body, status, _ = REFUSED[name]
        response = await client.post("/v1/logprobs", content=body, headers=JSON_HEADERS)
        # On a busy machine the last of so many bodies may need more than their ten seconds.
        assert response.status_code in (status, 408), (name, response.text)

    async def all_at_once() -> None:
        async with httpx.AsyncClient(base_url=teacher.url, timeout=PATIENCE_SECONDS) as client:
            small = [name for name, (body, _, _) in REFUSED.items() if len(body) < 2 * MIB]
            await asyncio.gather(*(request_scores(client, name) for name in small * 4))

    asyncio.run(all_at_once())
