"""Handshake with a mopd service: manifest, replicas, tokenizer, readiness."""

from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from mopd_client.services.expectation import Expectation
from mopd_client.teacher_client import TeacherClient
from mopd_protocol.errors import (
    ConfigError,
    DataError,
    InvalidResponseError,
    TeacherError,
    TeacherMismatchError,
    TeacherUnavailableError,
)
from mopd_protocol.manifest import Features, Manifest
from mopd_protocol.requests import SequenceRequest
from tests.client.scripted_teacher import (
    TABLE,
    TOKENIZER_JSON,
    ScriptedTeacher,
    manifest,
    network,
    problem,
)
from tests.client.still_clock import StillClock
from tests.protocol import known_tokenizers

pytestmark = pytest.mark.anyio

SEQUENCE = SequenceRequest(prompt="?", completion_token_ids=[70])
PLAIN = Features(candidate_ids=False, temperature=False, messages=False)
OTHER = "1f3a" * 8


def client_of(*teachers: ScriptedTeacher, **settings: Any) -> TeacherClient:
    """A client with one replica per teacher: http://a, http://b, …"""
    hosts = dict(zip("abc", teachers, strict=False))
    return TeacherClient(
        "math",
        [f"http://{host}/" for host in hosts],
        transport=network(**hosts),
        clock=StillClock().clock,
        **{"verify": 0, **settings},
    )


def unreachable() -> ScriptedTeacher:
    teacher = ScriptedTeacher()
    for path in ("/readyz", "/v1/manifest", "/v1/tokenizer", "/v1/logprobs"):
        teacher.script(path, *[httpx.ConnectError("refused")] * 999)
    return teacher


async def test_a_handshake_requests_the_manifest_of_every_replica():
    teachers = [ScriptedTeacher() for _ in range(3)]
    async with client_of(*teachers) as client:
        assert await client.handshake() == manifest()

    assert [len(teacher.requests_to("/v1/manifest")) for teacher in teachers] == [1, 1, 1]


async def test_replicas_of_different_models_raise():
    async with client_of(ScriptedTeacher(), ScriptedTeacher(manifest(revision="r2"))) as client:
        with pytest.raises(TeacherMismatchError, match=r"http://a.* r2, .*http://b") as caught:
            await client.handshake()

    assert caught.value.key == "manifest_id"


async def test_replicas_may_differ_in_name_and_limits_and_the_lowest_limits_apply():
    short, narrow = manifest(max_model_len=128), manifest(max_top_k=8, service="b")
    async with client_of(ScriptedTeacher(short), ScriptedTeacher(narrow)) as client:
        result = await client.handshake()
        assert (result.max_model_len, result.max_top_k) == (128, 8)
        assert (result.manifest_id, result.service) == (manifest().manifest_id, "scripted")
        with pytest.raises(ConfigError, match="at most 8, expected 64"):
            await client.handshake(Expectation(top_k=64))


NEXT_VERSION = {**manifest().model_dump(mode="json"), "schema_version": 3, "novelty": True}
WRONG_HASH = {**manifest().model_dump(mode="json"), "manifest_id": "x"}


@pytest.mark.parametrize(
    ("response", "error", "key", "message"),
    [
        (httpx.Response(200, text="<html>"), InvalidResponseError, None, "/v1/manifest"),
        (httpx.Response(200, json=[1]), InvalidResponseError, None, "mopd teacher"),
        (httpx.Response(200, json=NEXT_VERSION), TeacherMismatchError, "schema_version", "found 3"),
        (httpx.Response(200, json={}), TeacherMismatchError, "schema_version", "found None"),
        (httpx.Response(200, json={"schema_version": 2}), InvalidResponseError, "manifest", None),
        (httpx.Response(200, json=WRONG_HASH), InvalidResponseError, "manifest_id", "found x"),
        (httpx.Response(404, text="Not Found"), TeacherError, None, "404: Not Found$"),
        (problem(401, "no key"), TeacherError, None, "401: no key.*api_key"),
        (httpx.Response(500), TeacherError, None, "500: Internal Server Error"),
        (httpx.Response(500, json={"title": "Broken"}), TeacherError, None, "500: Broken"),
        (httpx.Response(500, text="x" * 999), TeacherError, None, f"500: {'x' * 200}$"),
    ],
)
async def test_a_response_without_a_valid_manifest_raises(response, error, key, message):
    teacher = ScriptedTeacher()
    teacher.script("/v1/manifest", response)
    async with client_of(teacher) as client:
        with pytest.raises(error, match=message) as caught:
            await client.handshake()
    assert (caught.value.key, caught.value.status) == (key, response.status_code)


@pytest.mark.parametrize(
    ("expectation", "changes", "error", "key", "numbers"),
    [
        (Expectation(top_k=65), {}, ConfigError, "top_k", "64, expected 65"),
        (Expectation(temperature=0.7), {"features": PLAIN}, ConfigError, "temperature", "0.7"),
        (Expectation(candidate_ids=True), {"features": PLAIN}, ConfigError, "candidate_ids", ""),
        (Expectation(messages=True), {"features": PLAIN}, ConfigError, "messages", ""),
        (
            Expectation(top_k=65, messages=True),
            {"features": PLAIN},
            ConfigError,
            "top_k",
            "64, .*; chat template",
        ),
        (
            Expectation(tokenizer_fingerprint=OTHER),
            {},
            TeacherMismatchError,
            "tokenizer_fingerprint",
            f"{TABLE.fingerprint[:12]}, expected {OTHER[:12]}",
        ),
        (
            Expectation(manifest_id=OTHER),
            {},
            TeacherMismatchError,
            "manifest_id",
            f"{manifest().manifest_id[:12]}: .* expected {OTHER[:12]}",
        ),
    ],
)
async def test_an_unmet_expectation_raises(expectation, changes, error, key, numbers):
    async with client_of(ScriptedTeacher(manifest(**changes))) as client:
        with pytest.raises(error, match=f"^teacher 'math' at http://a: .*{numbers}") as caught:
            await client.handshake(expectation)
    assert caught.value.key == key


async def test_satisfied_expectations_return_the_manifest():
    strict = Expectation(
        top_k=64,
        temperature=0.7,
        candidate_ids=True,
        messages=True,
        tokenizer_fingerprint=TABLE.fingerprint,
        manifest_id=manifest().manifest_id,
    )
    async with client_of(ScriptedTeacher()) as client:
        assert await client.handshake(strict) == manifest()
    async with client_of(ScriptedTeacher(manifest(features=PLAIN))) as client:
        assert (await client.handshake(Expectation())).features == PLAIN


async def test_a_second_handshake_with_another_teacher_raises():
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        await client.handshake()
        teacher.manifest = manifest(revision="r2")
        with pytest.raises(DataError) as caught:
            await client.handshake()
    assert caught.value.key == "manifest_id"


@pytest.mark.parametrize("api_key", ["secret", None])
async def test_the_api_key_is_sent_with_every_request(api_key):
    teacher = ScriptedTeacher()
    async with client_of(teacher, api_key=api_key) as client:
        await client.wait_until_ready(600.0)
        await client.tokenizer()

    paths = {request.path for request in teacher.requests}
    assert paths == {"/readyz", "/v1/manifest", "/v1/tokenizer"}
    headers = {request.headers.get("authorization") for request in teacher.requests}
    assert headers == {None if api_key is None else "Bearer secret"}


async def test_the_tokenizer_is_the_teachers_and_is_fetched_once():
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        first = await client.tokenizer()
        assert await client.tokenizer() is first

    assert len(teacher.requests_to("/v1/tokenizer")) == 1
    assert first.table.fingerprint == TABLE.fingerprint
    assert first.table.roles == teacher.manifest.roles
    assert first.tokenizer.to_str() == TOKENIZER_JSON
    assert first.table.sequence(first.encoder.encode(" 42 的")).text == " 42 的".encode()


@pytest.mark.parametrize(
    ("files", "error", "key"),
    [
        ({}, InvalidResponseError, "files"),
        (None, InvalidResponseError, "files"),
        ({"tokenizer.json": "{}"}, InvalidResponseError, "tokenizer.json"),
        ({"tokenizer.json": 3}, InvalidResponseError, "tokenizer.json"),
        (
            {"tokenizer.json": known_tokenizers.description("whole_number")},
            TeacherMismatchError,
            "tokenizer_fingerprint",
        ),
    ],
)
async def test_a_tokenizer_other_than_the_manifests_raises(files, error, key):
    teacher = ScriptedTeacher()
    teacher.script("/v1/tokenizer", httpx.Response(200, json={"files": files}))
    async with client_of(teacher) as client:
        with pytest.raises(error) as caught:
            await client.tokenizer()
    assert caught.value.key == key


async def test_truncation_and_padding_of_the_file_are_not_applied():
    tokenizer = Tokenizer.from_str(TOKENIZER_JSON)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    teacher = ScriptedTeacher()
    files = {"tokenizer.json": tokenizer.to_str()}
    teacher.script("/v1/tokenizer", httpx.Response(200, json={"files": files}))
    async with client_of(teacher) as client:
        loaded = await client.tokenizer()
    expected = Tokenizer.from_str(TOKENIZER_JSON).encode("12 + 30 = 42").ids
    assert loaded.tokenizer.encode("12 + 30 = 42").ids == expected


async def test_a_tokenizer_without_the_manifests_roles_raises():
    roles = manifest().roles.model_copy(update={"eos": 10**6})
    unfit: Manifest = manifest(roles=roles)
    async with client_of(ScriptedTeacher(unfit)) as client:
        with pytest.raises(InvalidResponseError, match="1000000") as caught:
            await client.tokenizer()
    assert caught.value.key == "tokenizer.json"


async def test_wait_until_ready_polls_every_replica():
    first, second = ScriptedTeacher(), ScriptedTeacher()
    second.script("/readyz", httpx.ConnectError("refused"), problem(503, "loading"))
    async with client_of(first, second) as client:
        await client.wait_until_ready(30.0)

    assert (len(first.requests_to("/readyz")), len(second.requests_to("/readyz"))) == (1, 3)


async def test_a_starting_teacher_does_not_open_its_circuit_breaker(caplog):
    teacher, still = ScriptedTeacher(), StillClock()
    teacher.script("/readyz", *[httpx.ConnectError("refused")] * 9)
    client = TeacherClient("math", ["http://a"], transport=network(a=teacher), clock=still.clock)
    async with client:
        await client.wait_until_ready(1000.0)

    assert still.pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert client.counters.breaker_openings == 0
    assert caplog.messages == []


async def test_wait_until_ready_raises_with_the_reason():
    teacher = ScriptedTeacher()
    teacher.script("/readyz", *[problem(503, "loading") for _ in range(99)])
    async with client_of(teacher) as client:
        with pytest.raises(TeacherUnavailableError, match="503: loading") as caught:
            await client.wait_until_ready(5.0)
    assert caught.value.status == 503


@pytest.mark.parametrize("available", [0, 1])
async def test_one_replica_is_enough_with_require_all_replicas_false(available):
    teachers = [unreachable(), unreachable()]
    teachers[available] = ScriptedTeacher()
    async with client_of(*teachers, require_all_replicas=False) as client:
        await client.wait_until_ready(30.0)
        assert await client.handshake() == manifest()
        assert (await client.tokenizer()).table.fingerprint == TABLE.fingerprint
        assert len(await client.score([SEQUENCE], top_k=1)) == 1


@pytest.mark.parametrize("require_all", [True, False])
async def test_too_few_available_replicas_raise(require_all):
    teachers = [ScriptedTeacher() if require_all else unreachable(), unreachable()]
    async with client_of(*teachers, require_all_replicas=require_all) as client:
        with pytest.raises(TeacherUnavailableError, match="refused"):
            await client.wait_until_ready(30.0)
        with pytest.raises(TeacherUnavailableError, match="refused"):
            await client.handshake()


async def test_an_optional_replica_must_not_be_another_teacher_or_reject_the_handshake():
    other, rejecting = ScriptedTeacher(manifest(revision="r2")), ScriptedTeacher()
    rejecting.script("/v1/manifest", problem(401, "no key"))
    for replica, key, status in ((other, "manifest_id", 200), (rejecting, None, 401)):
        async with client_of(ScriptedTeacher(), replica, require_all_replicas=False) as client:
            with pytest.raises(TeacherError) as caught:
                await client.handshake()
        assert (caught.value.key, caught.value.status) == (key, status)


async def test_a_replica_that_starts_late_must_have_the_same_manifest():
    late = unreachable()
    async with client_of(ScriptedTeacher(), late, require_all_replicas=False) as client:
        await client.handshake()
        late.scripts.clear()
        late.manifest = manifest(revision="r2")
        client.replicas[0].in_flight = 1  # so that the late replica is chosen
        with pytest.raises(DataError) as caught:
            await client.score([SEQUENCE], top_k=1)
    assert caught.value.key == "manifest_id"


@pytest.mark.parametrize(
    ("urls", "settings", "key"),
    [
        ([], {}, "url"),
        ("http://a", {}, "url"),
        (["a:8101"], {}, "url"),
        (["http://a:port"], {}, "url"),
        (["http://[::1"], {}, "url"),
        (["http://:8101"], {}, "url"),
        (["http://a/?key=1"], {}, "url"),
        (["http://a", "http://a/"], {}, "url"),
        (["http://a"], {"timeout_seconds": 0}, "timeout_seconds"),
        (["http://a"], {"deadline_seconds": 0}, "deadline_seconds"),
        (["http://a"], {"max_concurrency": 0}, "max_concurrency"),
        (["http://a"], {"api_key": "line\n"}, "api_key"),
        (["http://a"], {"api_key": "two words"}, "api_key"),
        (["http://a"], {"api_key": "schlüssel"}, "api_key"),
    ],
)
def test_invalid_options_raise(urls, settings, key):
    with pytest.raises(ConfigError) as caught:
        TeacherClient("math", urls, **settings)
    assert caught.value.key == key
    assert "api_key" not in settings or settings["api_key"] not in str(caught.value)
