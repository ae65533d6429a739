"""Every error: its status, and a sentence that says what was found and what was expected."""

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from mopd_protocol.requests import MOST_SEQUENCES, SequenceRequest
from mopd_server.app import create_app
from mopd_server.http.problems import PROBLEM_MEDIA_TYPE
from mopd_server.scoring.service import LARGE_TEXT
from tests.server.tiny_teachers import (
    TinyTeacher,
    get,
    post,
    request_async,
    teacher_of_family,
)

SEQUENCE = {"prompt": "the quick", "completion": " fox"}


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The problem document of an answer, which must have this status."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
    body = answer.json()
    assert body["status"] == status
    assert body["title"]
    return body


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"sequences": [SEQUENCE], "topk": 4}, "body: found an unknown key 'topk'; expected only"),
        (
            {"sequences": [{**SEQUENCE, "text": "a"}]},
            "sequences[0]: found an unknown key 'text'; expected only id, messages, prompt",
        ),
        (
            {"sequences": [{"messages": [{"role": "user", "content": "", "name": "x"}]}]},
            "sequences[0].messages[0]: found an unknown key 'name'; expected only role, content",
        ),
        (
            {"sequences": [SEQUENCE, {**SEQUENCE, "prompt_token_ids": [1]}]},
            "sequences[1]: found prompt and prompt_token_ids; expected exactly one of messages, "
            "prompt, prompt_token_ids",
        ),
        (
            {"sequences": [{"prompt": "a"}]},
            "sequences[0]: found no completion; expected exactly one of completion, "
            "completion_token_ids",
        ),
        ({"sequences": [SEQUENCE], "top_k": 0}, "top_k: found 0; expected greater than or equal"),
        ({"sequences": [SEQUENCE], "temperature": 0}, "temperature: found 0; expected greater"),
        ({"top_k": 4}, "sequences: found nothing; expected a value"),
        ({"sequences": []}, "sequences: found []; expected"),
        (
            {"sequences": [{"prompt": "a", "completion": ""}] * (MOST_SEQUENCES + 1)},
            f"sequences: found more than {MOST_SEQUENCES}; expected at most {MOST_SEQUENCES}; send",
        ),
        (
            {"sequences": [{"prompt_token_ids": [-1], "completion": ""}]},
            "sequences[0].prompt_token_ids[0]: found -1; expected greater than or equal to 0",
        ),
        ("{", "body: found invalid JSON"),
    ],
)
def test_a_malformed_body_is_told_field_found_and_expected(
    qwen_teacher: TinyTeacher, body: Any, sentence: str
) -> None:
    answer = problem(post(qwen_teacher.app, body), 400)
    assert sentence in answer["detail"]
    assert all(set(error) == {"field", "found", "expected"} for error in answer["errors"])


def test_a_body_that_is_not_called_json_is_told_the_header(qwen_teacher: TinyTeacher) -> None:
    answer = post(qwen_teacher.app, '{"sequences": []}', {"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in problem(answer, 400)["detail"]


@pytest.mark.parametrize(
    ("change", "status", "sentence"),
    [
        ({"top_k": 421}, 400, "top_k: found 421, expected at most 420"),
        ({"temperature": 1e-9}, 400, "temperature: found 1e-09, expected 0.01 to 100"),
    ],
)
def test_settings_beyond_this_teacher_are_refused(
    qwen_teacher: TinyTeacher, change: dict[str, Any], status: int, sentence: str
) -> None:
    answer = post(qwen_teacher.app, {"sequences": [SEQUENCE], **change})
    assert sentence in problem(answer, status)["detail"]


@pytest.mark.parametrize(
    ("sequence", "status", "sentence"),
    [
        (
            {"prompt_token_ids": [1] * 250, "completion_token_ids": [2] * 7},
            413,
            "sequences[1]: found 257 tokens (250 of prompt and 7 of completion), "
            "expected at most 256",
        ),
        (
            {"prompt_token_ids": [99999], "completion": ""},
            400,
            "sequences[1]: prompt_token_ids holds id 99999",
        ),
        ({"prompt": "", "completion": "a"}, 400, "sequences[1]: the prompt has no tokens"),
        (
            {"prompt": "a", "completion": [{"control": "<x>"}]},
            422,
            "sequences[1]: this teacher has no control token '<x>'",
        ),
    ],
)
def test_a_sequence_that_cannot_be_scored_is_named(
    qwen_teacher: TinyTeacher, sequence: dict[str, Any], status: int, sentence: str
) -> None:
    answer = post(qwen_teacher.app, {"sequences": [SEQUENCE, sequence]})
    assert sentence in problem(answer, status)["detail"]


def test_exactly_the_longest_sequence_is_scored(qwen_teacher: TinyTeacher) -> None:
    sequence = {"prompt_token_ids": [1] * 250, "completion_token_ids": [2] * 6}
    assert post(qwen_teacher.app, {"sequences": [sequence]}).status_code == 200


def test_too_many_candidates_are_refused() -> None:
    app = teacher_of_family("qwen", top_k_max=2).app
    sequence = {**SEQUENCE, "candidate_ids": [[1, 2, 3]]}
    answer = problem(post(app, {"sequences": [sequence], "top_k": 1}), 400)
    assert "sequences[0].candidate_ids: found 3 ids for one token" in answer["detail"]


def test_unknown_paths_and_methods_are_problems_too(qwen_teacher: TinyTeacher) -> None:
    assert "/docs" in problem(get(qwen_teacher.app, "/v2/logprobs"), 404)["detail"]
    answer = get(qwen_teacher.app, "/v1/logprobs")
    assert "does not take GET; expected POST" in problem(answer, 405)["detail"]
    assert answer.headers["allow"] == "POST"
    slash = asyncio.run(request_async(qwen_teacher.app, "POST", "/v1/logprobs/", {}))
    assert "there is no /v1/logprobs/ here" in problem(slash, 404)["detail"]


def test_a_large_body_is_refused_announced_or_not(qwen_teacher: TinyTeacher) -> None:
    app = create_app(qwen_teacher.service, max_body_bytes=100)
    detail = problem(post(app, "x" * 101), 413)["detail"]
    assert "101 bytes, above this teacher's limit of 100" in detail

    async def in_pieces() -> httpx.Response:
        async def pieces():
            for _ in range(11):
                yield b" " * 10

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            headers = {"Content-Type": "application/json"}
            return await client.post("/v1/logprobs", content=pieces(), headers=headers)

    assert "limit of 100" in problem(asyncio.run(in_pieces()), 413)["detail"]
    assert problem(post(app, "x" * 100), 400)  # as large as allowed: read, and found wanting


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "Basic right", "Bearer righ"])
def test_a_teacher_with_keys_answers_only_to_them(
    qwen_teacher: TinyTeacher, header: str | None
) -> None:
    app = create_app(qwen_teacher.service, api_keys=["other", "right"])
    headers = {"Authorization": header} if header else {}
    for answer in (
        post(app, {"sequences": [SEQUENCE]}, headers),
        get(app, "/v1/manifest", headers),
        get(app, "/v1/tokenizer", headers),
    ):
        assert "Authorization: Bearer KEY" in problem(answer, 401)["detail"]
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/healthz", "/readyz", "/metrics"):
        assert get(app, path, headers).status_code == 200


def test_a_known_key_opens(qwen_teacher: TinyTeacher) -> None:
    app = create_app(qwen_teacher.service, api_keys=["other", "right"])
    for key in ("other", "right"):
        headers = {"Authorization": f"Bearer {key}"}
        assert post(app, {"sequences": [SEQUENCE]}, headers).status_code == 200


def test_a_teacher_is_not_ready_before_its_warm_up_has_passed() -> None:
    teacher = teacher_of_family("qwen", warm=False)
    app = teacher.app
    for answer in (get(app, "/readyz"), post(app, {"sequences": [SEQUENCE]})):
        assert "is still warming up" in problem(answer, 503)["detail"]
        assert int(answer.headers["retry-after"]) >= 1
    assert "math" not in get(app, "/readyz").text  # who asks shows no key
    assert get(app, "/healthz").status_code == 200
    teacher.service.warm_up()
    assert get(app, "/readyz").json() == {"status": "ready"}
    assert post(app, {"sequences": [SEQUENCE]}).status_code == 200


def test_probes_may_ask_for_the_head_alone() -> None:
    teacher = teacher_of_family("qwen", warm=False)

    def status(path: str) -> int:
        return asyncio.run(request_async(teacher.app, "HEAD", path)).status_code

    assert [status(path) for path in ("/healthz", "/readyz")] == [200, 503]
    teacher.service.warm_up()
    assert status("/readyz") == 200


def test_a_started_application_warms_itself_up() -> None:
    teacher = teacher_of_family("qwen", warm=False)
    app = teacher.app

    async def started() -> int:
        async with app.router.lifespan_context(app):
            while (answer := await request_async(app, "GET", "/readyz")).status_code == 503:
                await asyncio.sleep(0)
            return answer.status_code

    assert asyncio.run(started()) == 200


def broken_engine(*arguments: object, **options: object) -> None:
    raise RuntimeError("out of memory in /opt/models/secret/model.py")


def test_a_failed_warm_up_makes_the_process_unhealthy_and_tells_strangers_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher = teacher_of_family("qwen", warm=False)
    monkeypatch.setattr(teacher.engine, "score", broken_engine)
    teacher.service.warm_up()
    for path in ("/readyz", "/healthz"):
        answer = get(teacher.app, path)
        assert "its log says why; restart it" in problem(answer, 503)["detail"]
        assert not re.search("memory|secret|math", answer.text)


def test_an_engine_failure_is_a_500_and_the_next_request_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher = teacher_of_family("qwen")
    with monkeypatch.context() as patch:
        patch.setattr(teacher.engine, "score", broken_engine)
        answer = post(teacher.app, {"sequences": [SEQUENCE]})
        assert "failed on this batch with RuntimeError" in problem(answer, 500)["detail"]
        assert not re.search("secret|opt|Traceback", answer.text)
    assert post(teacher.app, {"sequences": [SEQUENCE]}).status_code == 200


def test_an_error_that_nobody_foresaw_is_a_problem_too(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teacher_of_family("qwen")
    monkeypatch.setattr(teacher.tokenizer, "tokenize", broken_engine)
    answer = post(teacher.app, {"sequences": [SEQUENCE]})
    assert "failed with RuntimeError; its log says more" in problem(answer, 500)["detail"]


def held_engine(
    teacher: TinyTeacher,
) -> tuple[Callable[..., Any], threading.Event, threading.Event]:
    """The teacher's ``score``, which says when it has begun and waits until it is let go."""
    score, begun, let_go = teacher.engine.score, threading.Event(), threading.Event()

    def held(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert let_go.wait(timeout=300), "a failed test did not let go"
        return score(*arguments, **options)

    return held, begun, let_go


def test_a_full_queue_answers_429_with_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teacher_of_family("qwen", max_queue_tokens=1)
    app, body = teacher.app, {"sequences": [SEQUENCE]}
    held, begun, let_go = held_engine(teacher)
    monkeypatch.setattr(teacher.engine, "score", held)

    async def scenario() -> list[httpx.Response]:
        first = asyncio.create_task(request_async(app, "POST", "/v1/logprobs", body))
        await asyncio.to_thread(begun.wait)
        second = asyncio.create_task(request_async(app, "POST", "/v1/logprobs", body))
        while "mopd_queue_sequences 1.0" not in (await request_async(app, "GET", "/metrics")).text:
            await asyncio.sleep(0)
        third = await request_async(app, "POST", "/v1/logprobs", body)
        let_go.set()
        return [await first, await second, third]

    first, second, third = asyncio.run(scenario())
    assert (first.status_code, second.status_code) == (200, 200)
    assert "ask again later" in problem(third, 429)["detail"]
    assert int(third.headers["retry-after"]) >= 1


def test_a_request_past_its_time_is_a_504(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teacher_of_family("qwen")
    app = create_app(teacher.service, request_timeout_seconds=0)
    held, _, let_go = held_engine(teacher)
    monkeypatch.setattr(teacher.engine, "score", held)
    answer = post(app, {"sequences": [SEQUENCE]})
    let_go.set()
    assert "no answer within 0 s" in problem(answer, 504)["detail"]


def test_work_for_a_client_that_has_gone_leaves_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher = teacher_of_family("qwen")
    app, body = teacher.app, {"sequences": [SEQUENCE]}
    held, begun, let_go = held_engine(teacher)
    monkeypatch.setattr(teacher.engine, "score", held)

    async def scenario() -> str:
        first = asyncio.create_task(request_async(app, "POST", "/v1/logprobs", body))
        await asyncio.to_thread(begun.wait)
        leaving = asyncio.Event()
        second = asyncio.create_task(call_and_leave(app, leaving))
        while "mopd_queue_sequences 1.0" not in (await request_async(app, "GET", "/metrics")).text:
            await asyncio.sleep(0)
        leaving.set()
        await second
        metrics = await request_async(app, "GET", "/metrics")
        let_go.set()
        assert (await first).status_code == 200
        return metrics.text

    metrics = asyncio.run(scenario())
    assert "mopd_queue_sequences 0.0" in metrics
    assert 'mopd_requests_total{path="/v1/logprobs",status="499"} 1.0' in metrics


@pytest.mark.parametrize("part", ["prompt", "messages", "completion"])
def test_probes_are_answered_while_a_text_of_megabytes_is_tokenized(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Its tokenizer works for seconds, as other teachers' do for a moment."""
    teacher = teacher_of_family("qwen")
    tokenize, text = teacher.tokenizer.tokenize, "a" * 2**20
    given = [{"role": "user", "content": text}] if part == "messages" else text
    sequence = {"messages": None, **SEQUENCE, part: given}
    if part == "messages":
        del sequence["prompt"]

    async def scenario() -> httpx.Response:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def telling(request: Any) -> Any:
            loop.call_soon_threadsafe(begun.set)
            return tokenize(request)

        monkeypatch.setattr(teacher.tokenizer, "tokenize", telling)
        body = {"sequences": [sequence]}
        asked = asyncio.create_task(request_async(teacher.app, "POST", "/v1/logprobs", body))
        await begun.wait()
        probes = 0
        while not asked.done():
            assert (await request_async(teacher.app, "GET", "/healthz")).status_code == 200
            probes += 1
        assert probes > 15, "they had to wait for the text"
        return await asked

    problem(asyncio.run(scenario()), 413)


def test_large_texts_are_tokenized_one_at_a_time_and_small_ones_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher = teacher_of_family("qwen")
    tokenize, let_go = teacher.tokenizer.tokenize, threading.Event()
    begun: list[str] = []

    def held(sequence: SequenceRequest) -> Any:
        begun.append(sequence.id or "")
        if sequence.id != "small":
            assert let_go.wait(timeout=300), "a failed test did not let go"
        return tokenize(sequence)

    monkeypatch.setattr(teacher.tokenizer, "tokenize", held)

    async def scenario() -> list[httpx.Response]:
        def ask(name: str, **fields: Any) -> "asyncio.Task[httpx.Response]":
            body = {"sequences": [{**SEQUENCE, "id": name, **fields}]}
            return asyncio.create_task(request_async(teacher.app, "POST", "/v1/logprobs", body))

        half = "a" * (LARGE_TEXT // 2)
        large = [ask("first", prompt="a" + half + half)]
        while not begun:
            await asyncio.sleep(0)
        large.append(ask("second", prompt=half, completion=["a" + half, {"control": "<|end|>"}]))
        for _ in range(3):
            assert (await ask("small")).status_code == 200
        assert begun == ["first", "small", "small", "small"]
        let_go.set()
        return [await asked for asked in large]

    assert [answer.status_code for answer in asyncio.run(scenario())] == [413, 413]


async def call_and_leave(app: Any, leaving: asyncio.Event) -> None:
    """A scoring request whose client closes the connection when ``leaving`` is set."""
    body = [
        {"type": "http.request", "body": b'{"sequences": [{"prompt": "a", "completion": "b"}]}'}
    ]

    async def receive() -> dict[str, Any]:
        if body:
            return body.pop()
        await leaving.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        """Nobody listens."""

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/logprobs",
        "raw_path": b"/v1/logprobs",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
