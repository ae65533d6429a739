"""Who is let in, how that changes while a teacher runs, and how much each may ask."""

import asyncio
import os
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_server.app import create_app
from mopd_server.http.middleware.authentication import ApiKeys
from mopd_server.http.middleware.quotas import KeyQuota, Quotas
from mopd_server.service_error import ServiceError
from tests.server.tiny_teachers import TinyTeacher, get, post, request_async

SMALL = {"sequences": [{"prompt_token_ids": [1, 2], "completion_token_ids": [3]}], "top_k": 1}


def bearer(key: str) -> dict[str, str]:
    """The header that shows a key."""
    return {"Authorization": f"Bearer {key}"}


def test_keys_come_from_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \nalice: three\nbob\tfour\n# five\n")
    keys = ApiKeys.read(file)
    names = [keys.name_of(key) for key in ("one", "two", "three", "four", "five", "alice")]
    assert names == ["key-1", "key-2", "alice", "bob", None, None]
    assert len(keys) == 4
    monkeypatch.setenv("MOPD_API_KEYS", "six, carol:seven,")
    assert ApiKeys.read(None).name_of("seven") == ApiKeys.read(file).name_of("seven") == "carol"
    assert not ApiKeys().asked


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"\n#\n", "holds no API key"), (b"\xff\n", "not UTF-8"), (None, "cannot read the API keys")],
)
def test_a_file_without_keys_keeps_a_teacher_from_starting(
    tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        ApiKeys.read(file)


@pytest.mark.parametrize(
    "line", ["alice sesame  # of team a", "bob@corp sesame", "sesamé", "alice sesamé", "\x00sesame"]
)
def test_a_line_that_would_open_to_nobody_is_told_and_not_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# keys\none\n{line}\n")
    with pytest.raises(ValueError, match="keys, line 3 is no API key: it has characters") as told:
        ApiKeys.read(file)
    assert "sesam" not in str(told.value)
    if "\x00" not in line:
        monkeypatch.setenv("MOPD_API_KEYS", f"one,{line}")
        with pytest.raises(ValueError, match="MOPD_API_KEYS, key 2 is no API key"):
            ApiKeys.read(None)


def test_the_mark_at_the_beginning_of_a_file_is_no_part_of_its_first_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfone\r\nbob two\r\n")
    keys = ApiKeys.read(file)
    assert [keys.name_of(key) for key in ("one", "two")] == ["key-1", "bob"]


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice one\n")
    keys = ApiKeys.read(file)

    def rewrite(content: bytes) -> None:
        file.write_bytes(content)
        os.utime(file, ns=(0, next(moments)))  # a clock may be too coarse for a quick test

    moments = iter(range(1, 99))
    rewrite(b"alice two\n")
    assert (keys.name_of("one"), keys.name_of("two")) == (None, "alice")
    rewrite(b"\xff")
    assert keys.name_of("two") == "alice"
    file.unlink()
    assert keys.name_of("two") == "alice"
    rewrite(b"")
    assert keys.name_of("two") is None
    assert keys.asked


@settings(deadline=None)
@given(tokens=st.lists(st.integers(1, 400), max_size=30), pauses=st.data())
def test_a_key_never_gets_more_than_its_quota_and_one_request(
    tokens: list[int], pauses: st.DataObject
) -> None:
    """What was spent is never above the full bucket, what it earned since, and one request."""
    now, spent, rate = 0.0, 0, 120
    quotas = Quotas(KeyQuota(tokens_per_minute=rate), now=lambda: now)
    for wanted in tokens:
        try:
            quotas.spend("alice", wanted)
            spent += wanted
        except ServiceError as refusal:
            now += refusal.retry_after_seconds or 0
            quotas.spend("alice", wanted)  # who comes back when told to is let in
            spent += wanted
        assert spent <= rate + now * rate / 60 + max(0, wanted - rate) + 1e-3  # of rounding
        now += pauses.draw(st.sampled_from([0.0, 0.5, 30.0, 600.0]))


def test_tokens_of_a_refused_request_are_given_back() -> None:
    quotas = Quotas(KeyQuota(tokens_per_minute=10), now=lambda: 0.0)
    quotas.spend("alice", 10)
    with pytest.raises(ServiceError, match="key 'alice' has 0 tokens left of its quota of 10"):
        quotas.spend("alice", 1)
    quotas.spend("bob", 10)
    quotas.give_back("alice", 4)
    quotas.spend("alice", 4)
    with pytest.raises(ServiceError):
        quotas.spend("alice", 1)


def test_a_request_refused_by_the_queue_costs_no_quota(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(
        qwen_teacher.service, api_keys=["alice one"], quota=KeyQuota(tokens_per_minute=3)
    )

    async def full(*arguments: object, **options: object) -> None:
        raise ServiceError(429, "the queue is full", retry_after_seconds=1)

    with monkeypatch.context() as patch:
        patch.setattr(qwen_teacher.service._scorer, "score", full)
        assert "queue is full" in post(app, SMALL, bearer("one")).text
    assert post(app, SMALL, bearer("one")).status_code == 200
    assert "quota of 3 a minute" in post(app, SMALL, bearer("one")).text


def test_requests_beyond_a_keys_turns_are_refused_while_others_are_answered(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(
        qwen_teacher.service,
        api_keys=["alice one", "bob two"],
        quota=KeyQuota(requests_in_flight=1),
    )
    score = qwen_teacher.service.score

    async def scenario() -> list[httpx.Response]:
        begun, let_go = asyncio.Event(), asyncio.Event()

        async def held(*arguments: object, **options: object) -> object:
            begun.set()
            await let_go.wait()
            return await score(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(qwen_teacher.service, "score", held)
        first = asyncio.create_task(ask("one"))
        await begun.wait()
        second = await ask("one")
        other = asyncio.create_task(ask("two"))
        manifest = await request_async(app, "GET", "/v1/manifest", headers=bearer("one"))
        let_go.set()
        return [await first, second, await other, manifest, await ask("one")]

    async def ask(key: str) -> httpx.Response:
        return await request_async(app, "POST", "/v1/logprobs", SMALL, bearer(key))

    answers = asyncio.run(scenario())
    assert [answer.status_code for answer in answers] == [200, 429, 200, 200, 200]
    assert "key 'alice' has 1 requests in flight" in answers[1].json()["detail"]
    assert answers[1].headers["retry-after"] == "1"
    assert 'mopd_refused_requests_total{reason="quota_in_flight"} 1.0' in get(app, "/metrics").text
