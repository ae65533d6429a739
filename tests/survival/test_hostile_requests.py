"""What nobody should send: each is refused with a sentence, and the service goes on as it was."""

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
    """One process takes it all; a body has ten seconds, many times what those here need."""
    log = tmp_path_factory.mktemp("hostile") / "log"
    with running_teacher(model_folder, log, "--body-timeout", "10") as running:
        yield running
        assert running.stop() == 0
    assert "Traceback" not in log.read_text()


@pytest.fixture(autouse=True)
def goes_on(teacher: RunningTeacher) -> Iterator[None]:
    """After each attempt an ordinary request is answered, and nothing is left of the attempt."""
    yield
    answer = post(teacher, json.dumps(GOOD).encode())
    assert answer.status_code == 200, answer.text
    teacher.until_metric("mopd_requests_in_flight", 0)
    assert teacher.metric("mopd_queue_tokens") == 0


def post(teacher: RunningTeacher, body: bytes, **headers: str) -> httpx.Response:
    """The answer to a scoring request of exactly these bytes."""
    return httpx.post(
        f"{teacher.url}/v1/logprobs",
        content=body,
        headers={**JSON_HEADERS, **headers},
        timeout=PATIENCE_SECONDS,
    )


def refused(answer: httpx.Response, status: int) -> str:
    """The sentence of a problem document, which must have this status and tell no secret."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert problem["instance"] == answer.headers["x-request-id"]
    assert "Traceback" not in answer.text
    assert ".py" not in answer.text
    assert "secret-qwen" not in answer.text
    assert len(answer.text) < 10_000
    return problem["detail"]


def sequence(**fields: Any) -> bytes:
    """A request for one sequence."""
    given = {"prompt": "the quick", "completion": " fox", **fields}
    kept = {name: value for name, value in given.items() if value is not None}
    return json.dumps({"sequences": [kept], "top_k": 2}).encode()


def request(**fields: Any) -> bytes:
    """An ordinary request but for ``fields``."""
    return json.dumps({**GOOD, **fields}).encode()


REFUSED = {
    "no body": (b"", 400, "invalid JSON"),
    "invalid UTF-8": (b'{"sequences": [{"prompt": "\xff\xfe"}]}', 400, "invalid JSON"),
    "half a character pair": (b'{"sequences": [{"prompt": "\\ud800"}]}', 400, "invalid JSON"),
    "another encoding": (json.dumps(GOOD).encode("utf-16"), 400, "invalid JSON"),
    "deep": (b"[" * 100_000, 400, "invalid JSON"),
    "a number of a million digits": (b'{"top_k": ' + b"9" * MIB + b"}", 400, ""),
    "not a number": (b'{"sequences": [{}], "temperature": NaN}', 400, ""),
    "infinitely hot": (request(temperature=1).replace(b": 1}", b": 1e999}"), 400, "temperature"),
    "an array": (b"[]", 400, ""),
    "null": (b"null", 400, ""),
    "no k": (request(top_k=0), 400, "top_k: found 0"),
    "negative k": (request(top_k=-1), 400, "top_k: found -1"),
    "a billion k": (request(top_k=10**9), 400, "found 1000000000, expected at most"),
    "k beyond 64 bits": (request(top_k=10**30), 400, "top_k"),
    "no sequences": (request(sequences=[]), 400, "sequences: found []"),
    "no messages": (sequence(prompt=None, messages=[]), 400, "messages: found []"),
    "no tokens": (sequence(prompt=None, prompt_token_ids=[]), 400, "prompt has no tokens"),
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
    "a word of a million characters": (sequence(completion="a" * 10**6), 413, "expected at most"),
    "a million unknown control characters": (sequence(completion="\x01" * 10**6), 413, "at most"),
    "an unknown control token": (
        sequence(completion=[{"control": "<" + "x" * 10**6}]),
        422,
        "control token not found",
    ),
    "two million mistakes in ids": (
        b'{"sequences":[{"prompt":"a","completion_token_ids":[' + b"-1," * 2_000_000 + b"-1]}]}",
        400,
        "found -1",
    ),
    "two million mistakes in text": (
        b'{"sequences":[{"prompt":"a","completion":[' + b"1," * 2_000_000 + b"1]}]}",
        400,
        "completion",
    ),
    "a million unknown keys": (
        b"{" + b",".join(b'"k%07d":1' % key for key in range(1_000_000)) + b"}",
        400,
        "errors",
    ),
    "a key of a million characters": (
        b'{"' + b"k" * MIB + b'": 1, "sequences": []}',
        400,
        "the unknown key",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_body_that_nobody_should_send_is_refused_with_a_sentence(
    teacher: RunningTeacher, name: str
) -> None:
    body, status, sentence = REFUSED[name]
    memory = teacher.resident_mebibytes()
    assert sentence in refused(post(teacher, body), status)
    assert teacher.resident_mebibytes() < memory + 600


@pytest.mark.parametrize("text", ["\x00", "a\x00b", "\ufffe", "\u202e", "🏳️‍🌈", "\r\n" * 100])
def test_any_text_that_is_unicode_is_scored(teacher: RunningTeacher, text: str) -> None:
    answer = post(teacher, sequence(completion=text))
    assert answer.status_code == 200, answer.text
    assert answer.json()["sequences"][0]["text"] == text


@pytest.mark.parametrize("role", ["wizard", "", "assistant\x00", "r" * 10**6])
def test_a_role_that_the_template_does_not_know_ends_in_no_error(
    teacher: RunningTeacher, role: str
) -> None:
    answer = post(teacher, sequence(prompt=None, messages=[{"role": role, "content": "hello"}]))
    assert answer.status_code in (200, 400, 413, 422), answer.text


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/octet-stream", "json"])
def test_another_content_type_is_told_the_right_one(
    teacher: RunningTeacher, content_type: str
) -> None:
    answer = post(teacher, json.dumps(GOOD).encode(), **{"Content-Type": content_type})
    assert "Content-Type: application/json" in refused(answer, 400)


@pytest.mark.parametrize("name", ["x" * 200, "a b", "../../etc/passwd", "é", "-leading"])
def test_a_request_id_that_could_do_harm_is_replaced(teacher: RunningTeacher, name: str) -> None:
    header = {b"X-Request-Id": name.encode()}
    answer = httpx.get(f"{teacher.url}/nowhere", headers=header, timeout=PATIENCE_SECONDS)
    assert refused(answer, 404)
    assert answer.headers["x-request-id"] != name
    assert answer.headers["x-request-id"].isalnum()


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
    """The status of the answer that comes next."""
    found = b""
    while b"\r\n\r\n" not in found:
        piece = connection.recv(65536)
        assert piece, f"closed after {found!r}"
        found += piece
    return int(found.split()[1])


def test_a_body_that_never_ends_is_given_up(teacher: RunningTeacher) -> None:
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
    """Together they announce far more than the teacher keeps; those beyond are told to wait."""
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


def test_work_for_a_client_that_leaves_is_given_up(teacher: RunningTeacher) -> None:
    gone = "mopd_cancelled_requests_total"
    before, scored = teacher.metric(gone), teacher.metric("mopd_tokens_scored_total")
    body = json.dumps(
        {"sequences": [{"prompt": "a", "completion": " fox" * 400}] * 500, "top_k": 1}
    ).encode()
    with connected(teacher) as connection:
        connection.sendall(head(len(body)) + body)
        teacher.until_metric("mopd_requests_in_flight", 1)
    teacher.until_metric(gone, before + 1)
    teacher.until_metric("mopd_queue_sequences", 0)
    assert teacher.metric("mopd_tokens_scored_total") == scored


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_failure(
    teacher: RunningTeacher,
) -> None:
    gone = "mopd_cancelled_requests_total"
    failed = 'mopd_requests_total{path="/v1/logprobs",status="500"}'
    before, failures = teacher.metric(gone), teacher.metric(failed)
    with connected(teacher) as connection:
        connection.sendall(head(1000) + b'{"sequences"')
        teacher.until_metric("mopd_requests_in_flight", 1)
    teacher.until_metric(gone, before + 1)
    assert teacher.metric(failed) == failures


@pytest.mark.parametrize(
    "text",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # somebody who speaks TLS
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
            answer = connection.recv(65536)
        except ConnectionError:
            return
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer


def test_hundreds_of_connections_that_say_nothing_keep_nobody_out(teacher: RunningTeacher) -> None:
    silent = [connected(teacher) for _ in range(300)]
    try:
        assert post(teacher, json.dumps(GOOD).encode()).status_code == 200
    finally:
        for connection in silent:
            connection.close()


def test_all_of_this_at_once_is_no_worse(teacher: RunningTeacher) -> None:
    async def ask(client: httpx.AsyncClient, name: str) -> None:
        body, status, _ = REFUSED[name]
        answer = await client.post("/v1/logprobs", content=body, headers=JSON_HEADERS)
        # On a busy machine the last of so many bodies may need more than their ten seconds.
        assert answer.status_code in (status, 408), (name, answer.text)

    async def all_at_once() -> None:
        async with httpx.AsyncClient(base_url=teacher.url, timeout=PATIENCE_SECONDS) as client:
            small = [name for name, (body, _, _) in REFUSED.items() if len(body) < 2 * MIB]
            await asyncio.gather(*(ask(client, name) for name in small * 4))

    asyncio.run(all_at_once())
