"""Tests of API keys, their reload, and their quotas."""

import asyncio
import json
import os
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_protocol.errors import ConfigError
from mopd_server.app import create_app
from mopd_server.http.middleware.authentication import ApiKeys
from mopd_server.http.middleware.quotas import KeyQuota, Quotas
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
)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys_of_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \nalice: three\nbob\tfour\n# five\n")
    keys = ApiKeys.load(file)
    names = [keys.name_of(key) for key in ("one", "two", "three", "four", "five", "alice")]
    assert names == ["key-1", "key-2", "alice", "bob", None, None]
    assert len(keys) == 4
    monkeypatch.setenv("MOPD_API_KEYS", "six, carol:seven,")
    assert ApiKeys.load(None).name_of("seven") == ApiKeys.load(file).name_of("seven") == "carol"
    assert not ApiKeys().required


@pytest.mark.parametrize("content", [b"\n#\n", b"\xff\n", None])
def test_file_without_keys_is_a_config_error(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ApiKeys.load(file)
    assert caught.value.key == "api_key_file"


@pytest.mark.parametrize(
    "line", ["alice sesame  # of team a", "bob@corp sesame", "sesamé", "alice sesamé", "\x00sesame"]
)
def test_invalid_line_is_a_config_error_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# keys\none\n{line}\n")
    with pytest.raises(ConfigError, match="keys, line 3") as caught:
        ApiKeys.load(file)
    assert "sesam" not in str(caught.value)
    if "\x00" not in line:
        monkeypatch.setenv("MOPD_API_KEYS", f"one,{line}")
        with pytest.raises(ConfigError, match="MOPD_API_KEYS, key 2"):
            ApiKeys.load(None)


def test_byte_order_mark_is_not_part_of_the_first_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfone\r\nbob two\r\n")
    keys = ApiKeys.load(file)
    assert [keys.name_of(key) for key in ("one", "two")] == ["key-1", "bob"]


def test_changed_file_is_reloaded_and_an_unreadable_one_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice one\n")
    keys = ApiKeys.load(file)

    def rewrite(content: bytes) -> None:
        file.write_bytes(content)
        os.utime(file, ns=(0, next(times)))  # the clock may be too coarse

    times = iter(range(1, 99))
    rewrite(b"alice two\n")
    assert (keys.name_of("one"), keys.name_of("two")) == (None, "alice")
    rewrite(b"\xff")
    assert keys.name_of("two") == "alice"
    file.unlink()
    assert keys.name_of("two") == "alice"
    rewrite(b"")
    assert keys.name_of("two") is None
    assert keys.required


@settings(deadline=None)
@given(requests=st.lists(st.integers(1, 400), max_size=30), pauses=st.data())
def test_usage_is_at_most_the_quota_and_one_request(
    requests: list[int], pauses: st.DataObject
) -> None:
    """Usage never exceeds the full bucket, the tokens earned since, and one request."""
    now, used, rate = 0.0, 0, 120
    quotas = Quotas(KeyQuota(tokens_per_minute=rate), now=lambda: now)
    for tokens in requests:
        try:
            quotas.charge("alice", tokens)
        except ServiceError as error:
            now += error.retry_after_seconds or 0
            quotas.charge("alice", tokens)  # accepted after Retry-After seconds
        used += tokens
        assert used <= rate + now * rate / 60 + max(0, tokens - rate) + 1e-3  # rounding
        now += pauses.draw(st.sampled_from([0.0, 0.5, 30.0, 600.0]))


def test_refunded_tokens_can_be_used_again() -> None:
    quotas = Quotas(KeyQuota(tokens_per_minute=10), now=lambda: 0.0)
    quotas.charge("alice", 10)
    with pytest.raises(ServiceError) as caught:
        quotas.charge("alice", 1)
    assert (caught.value.status, caught.value.code) == (429, "quota_tokens")
    quotas.charge("bob", 10)
    quotas.refund("alice", 4)
    quotas.charge("alice", 4)
    with pytest.raises(ServiceError):
        quotas.charge("alice", 1)


def test_tokens_of_a_disconnected_client_are_refunded(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(
        qwen_teacher.service, api_keys=["alice one"], quota=KeyQuota(tokens_per_minute=3)
    )

    async def scenario() -> None:
        scoring, sent, disconnect = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def score_forever(*_: object, **__: object) -> None:
            scoring.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(qwen_teacher.service._scorer, "score", score_forever)
            body = json.dumps(SMALL).encode()
            sending = asyncio.create_task(send_raw(app, body, sent, disconnect, key="one"))
            await scoring.wait()
            problem(await post_async(app, SMALL, bearer("one")), 429, "quota_tokens")
            disconnect.set()
            await sending
        assert (await post_async(app, SMALL, bearer("one"))).status_code == 200

    asyncio.run(scenario())


def test_request_rejected_by_the_queue_is_refunded(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = KeyQuota(tokens_per_minute=3)
    app = create_app(qwen_teacher.service, api_keys=["alice one"], quota=quota)

    async def full(*arguments: object, **options: object) -> None:
        raise ServiceError(429, "the queue is full", retry_after_seconds=1)

    with monkeypatch.context() as patch:
        patch.setattr(qwen_teacher.service._scorer, "score", full)
        problem(post(app, SMALL, bearer("one")), 429, "queue_full")
    assert post(app, SMALL, bearer("one")).status_code == 200
    problem(post(app, SMALL, bearer("one")), 429, "quota_tokens")


def test_requests_in_flight_are_limited_per_key(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(
        qwen_teacher.service,
        api_keys=["alice one", "bob two"],
        quota=KeyQuota(requests_in_flight=1),
    )
    score = qwen_teacher.service.score

    async def scenario() -> list[httpx.Response]:
        started, gate = asyncio.Event(), asyncio.Event()

        async def blocked(*arguments: object, **options: object) -> object:
            started.set()
            await gate.wait()
            return await score(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(qwen_teacher.service, "score", blocked)
        first = asyncio.create_task(post_async(app, SMALL, bearer("one")))
        await started.wait()
        second = await post_async(app, SMALL, bearer("one"))
        other_key = asyncio.create_task(post_async(app, SMALL, bearer("two")))
        manifest = await request_async(app, "GET", "/v1/manifest", headers=bearer("one"))
        gate.set()
        last = post_async(app, SMALL, bearer("one"))
        return [second, await first, await other_key, manifest, await last]

    second, *others = asyncio.run(scenario())
    assert "'alice'" in problem(second, 429, "quota_in_flight")["detail"]
    assert second.headers["retry-after"] == "1"
    assert [response.status_code for response in others] == [200] * 4
    assert 'mopd_request_errors_total{reason="quota_in_flight"} 1.0' in get(app, "/metrics").text
