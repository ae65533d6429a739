"""A teacher that is not what the run expects is refused with a sentence that says what to do."""

from typing import Any

import httpx
import pytest

from mopd_client.services.expectation import Expectation
from mopd_client.teacher_client import TeacherClient
from mopd_protocol.errors import ConfigError, DataError, TeacherError
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


def client_of(*teachers: ScriptedTeacher, **settings: Any) -> TeacherClient:
    """A client with one replica a teacher: http://a, http://b, …"""
    hosts = dict(zip("abc", teachers, strict=False))
    return TeacherClient(
        "math",
        [f"http://{host}/" for host in hosts],
        transport=network(**hosts),
        clock=StillClock().clock,
        **settings,
    )


def absent() -> ScriptedTeacher:
    """A teacher that does not answer."""
    teacher = ScriptedTeacher()
    for path in ("/readyz", "/v1/manifest", "/v1/tokenizer", "/v1/logprobs"):
        teacher.script(path, *[httpx.ConnectError("refused")] * 999)
    return teacher


async def test_a_handshake_returns_the_manifest():
    async with client_of(ScriptedTeacher()) as client:
        assert await client.handshake() == manifest()


async def test_every_replica_is_asked_who_it_is():
    teachers = [ScriptedTeacher() for _ in range(3)]
    async with client_of(*teachers) as client:
        await client.handshake()

    assert [len(teacher.asked_for("/v1/manifest")) for teacher in teachers] == [1, 1, 1]


async def test_replicas_that_are_two_teachers_are_refused():
    async with client_of(ScriptedTeacher(), ScriptedTeacher(manifest(revision="r2"))) as client:
        with pytest.raises(TeacherError) as told:
            await client.handshake()

    assert "teacher 'math' is two teachers: http://a serves" in str(told.value)
    assert "(org/scripted r2, script 1, float32); expected replicas of one" in str(told.value)


async def test_replicas_may_differ_in_what_does_not_affect_scores():
    async with client_of(ScriptedTeacher(), ScriptedTeacher(manifest(service="b"))) as client:
        assert (await client.handshake()).service == "scripted"


async def test_of_replicas_with_other_limits_the_least_counts():
    short, narrow = manifest(max_model_len=128), manifest(max_top_k=8)
    async with client_of(ScriptedTeacher(short), ScriptedTeacher(narrow)) as client:
        found = await client.handshake()
        assert (found.max_model_len, found.max_top_k) == (128, 8)
        assert found.manifest_id == manifest().manifest_id
        with pytest.raises(ConfigError, match="serves a top_k of at most 8, expected 64"):
            await client.handshake(Expectation(top_k=64))


async def test_another_schema_version_is_refused_even_with_unknown_fields():
    teacher = ScriptedTeacher()
    document = {**manifest().model_dump(mode="json"), "schema_version": 2, "novelty": True}
    teacher.script("/v1/manifest", httpx.Response(200, json=document))
    async with client_of(teacher) as client:
        with pytest.raises(
            TeacherError, match="'math' at http://a speaks schema version 2, expected 1; run the"
        ):
            await client.handshake()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(200, text="<html>"), "answered /v1/manifest with .*is this address a mopd"),
        (httpx.Response(200, json=[1]), "expected a JSON object; is this address a mopd teacher"),
        (httpx.Response(200, json={}), "speaks schema version None, expected 1"),
        (httpx.Response(200, json={"schema_version": 1}), "sent no manifest"),
        (
            httpx.Response(200, json={**manifest().model_dump(mode="json"), "manifest_id": "x"}),
            "calls its manifest x, but it hashes to",
        ),
        (httpx.Response(404, text="Not Found"), "teacher 'math' answered 404: Not Found$"),
        (problem(401, "no key"), "teacher 'math' answered 401: no key; is its api_key right"),
        (httpx.Response(500), "teacher 'math' answered 500: Internal Server Error"),
        (httpx.Response(500, json={"title": "Broken"}), "answered 500: Broken"),
        (httpx.Response(500, text="x" * 999), f"answered 500: {'x' * 200}$"),
    ],
)
async def test_an_answer_that_is_no_manifest_is_refused(answer, message):
    teacher = ScriptedTeacher()
    teacher.script("/v1/manifest", answer)
    async with client_of(teacher) as client:
        with pytest.raises(TeacherError, match=message):
            await client.handshake()


@pytest.mark.parametrize(
    ("expectation", "found", "error", "message"),
    [
        (
            Expectation(top_k=65),
            {},
            ConfigError,
            "serves a top_k of at most 64, expected 65; lower top_k, or restart",
        ),
        (
            Expectation(temperature=0.7),
            {"features": PLAIN},
            ConfigError,
            "scores at temperature 1 only, expected 0.7; set the teacher's temperature to 1",
        ),
        (
            Expectation(candidate_ids=True),
            {"features": PLAIN},
            ConfigError,
            "cannot score candidate_ids, expected that it can; use its own top-k",
        ),
        (
            Expectation(messages=True),
            {"features": PLAIN},
            ConfigError,
            "has no chat template for messages, expected one; send prompt",
        ),
        (
            Expectation(top_k=65, messages=True),
            {"features": PLAIN},
            ConfigError,
            "serves a top_k of at most 64, .*; and it has no chat template",
        ),
        (
            Expectation(tokenizer_fingerprint="1f3a" * 8),
            {},
            DataError,
            f"has tokenizer {TABLE.fingerprint[:12]}, expected 1f3a1f3a1f3a; rebuild what",
        ),
        (
            Expectation(manifest_id="1f3a" * 8),
            {},
            DataError,
            f"has manifest {manifest().manifest_id[:12]} .*, expected 1f3a1f3a1f3a; serve what",
        ),
    ],
)
async def test_a_teacher_that_does_not_fit_the_run_is_refused(expectation, found, error, message):
    async with client_of(ScriptedTeacher(manifest(**found))) as client:
        with pytest.raises(error, match=f"^teacher 'math' {message}"):
            await client.handshake(expectation)


async def test_a_teacher_that_fits_the_run_is_taken():
    fitting = Expectation(
        top_k=64,
        temperature=0.7,
        candidate_ids=True,
        messages=True,
        tokenizer_fingerprint=TABLE.fingerprint,
        manifest_id=manifest().manifest_id,
    )
    async with client_of(ScriptedTeacher()) as client:
        assert await client.handshake(fitting) == manifest()
    async with client_of(ScriptedTeacher(manifest(features=PLAIN))) as client:
        assert (await client.handshake(Expectation())).features == PLAIN


async def test_a_second_handshake_with_another_teacher_is_refused():
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        await client.handshake()
        teacher.manifest = manifest(revision="r2")
        with pytest.raises(DataError, match="teacher 'math' has changed: its manifest is"):
            await client.handshake()


async def test_the_key_is_sent_with_every_request():
    teacher = ScriptedTeacher()
    async with client_of(teacher, api_key="secret") as client:
        await client.wait_until_ready(600.0)
        await client.tokenizer()

    assert {asked.path for asked in teacher.asked} == {"/readyz", "/v1/manifest", "/v1/tokenizer"}
    assert {asked.headers["authorization"] for asked in teacher.asked} == {"Bearer secret"}


async def test_without_a_key_none_is_sent():
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        await client.handshake()

    assert "authorization" not in teacher.asked[0].headers


async def test_the_tokenizer_is_the_teachers_and_is_fetched_once():
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        first = await client.tokenizer()
        assert await client.tokenizer() is first

    assert len(teacher.asked_for("/v1/tokenizer")) == 1
    assert first.table.fingerprint == TABLE.fingerprint
    assert first.table.roles == teacher.manifest.roles
    assert first.tokenizer.to_str() == TOKENIZER_JSON
    assert first.table.sequence(first.encoder.encode(" 42 的")).text == " 42 的".encode()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "sent no tokenizer.json; expected it under 'files'"),
        (None, "sent no tokenizer.json; expected it under 'files'"),
        ({"tokenizer.json": "{}"}, "sent no tokenizer: "),
        ({"tokenizer.json": 3}, "sent no tokenizer: "),
        (
            {"tokenizer.json": known_tokenizers.description("whole_number")},
            f"but its manifest names {TABLE.fingerprint[:12]}; run the same mopd",
        ),
    ],
)
async def test_a_tokenizer_that_is_not_the_manifests_is_refused(files, message):
    teacher = ScriptedTeacher()
    teacher.script("/v1/tokenizer", httpx.Response(200, json={"files": files}))
    async with client_of(teacher) as client:
        with pytest.raises(TeacherError, match=message):
            await client.tokenizer()


async def test_a_tokenizer_that_does_not_fit_its_roles_is_refused():
    roles = manifest().roles.model_copy(update={"eos": 10**6})
    unfit: Manifest = manifest(roles=roles)
    async with client_of(ScriptedTeacher(unfit)) as client:
        with pytest.raises(TeacherError, match="sent an unfit tokenizer: role eos names token id"):
            await client.tokenizer()


async def test_waiting_until_ready_polls_every_replica():
    one, other = ScriptedTeacher(), ScriptedTeacher()
    other.script("/readyz", httpx.ConnectError("refused"), problem(503, "loading"))
    async with client_of(one, other) as client:
        await client.wait_until_ready(30.0)

    assert (len(one.asked_for("/readyz")), len(other.asked_for("/readyz"))) == (1, 3)


async def test_a_teacher_that_is_still_starting_opens_no_breaker(caplog):
    teacher, still = ScriptedTeacher(), StillClock()
    teacher.script("/readyz", *[httpx.ConnectError("refused")] * 9)
    client = TeacherClient("math", ["http://a"], transport=network(a=teacher), clock=still.clock)
    async with client:
        await client.wait_until_ready(1000.0)

    assert still.sleeps == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert client.counters.breaker_openings == 0
    assert caplog.messages == []


async def test_a_teacher_that_is_never_ready_is_told_with_its_reason():
    teacher = ScriptedTeacher()
    teacher.script("/readyz", *[problem(503, "loading") for _ in range(99)])
    async with client_of(teacher) as client:
        with pytest.raises(TeacherError, match=r"'math' answered 503: loading \(gave up after"):
            await client.wait_until_ready(5.0)


@pytest.mark.parametrize("here", [0, 1])
async def test_one_replica_is_enough_where_the_run_says_so(here):
    teachers = [absent(), absent()]
    teachers[here] = ScriptedTeacher()
    async with client_of(*teachers, require_all_replicas=False) as client:
        await client.wait_until_ready(30.0)
        assert await client.handshake() == manifest()
        assert (await client.tokenizer()).table.fingerprint == TABLE.fingerprint
        assert len(await client.score([SEQUENCE], top_k=1)) == 1


async def test_all_replicas_are_needed_unless_told():
    async with client_of(ScriptedTeacher(), absent()) as client:
        with pytest.raises(TeacherError, match="gave no answer: refused"):
            await client.wait_until_ready(30.0)
        with pytest.raises(TeacherError, match="gave no answer: refused"):
            await client.handshake()


async def test_where_one_is_enough_none_is_too_few():
    async with client_of(absent(), absent(), require_all_replicas=False) as client:
        with pytest.raises(TeacherError, match="gave no answer: refused"):
            await client.wait_until_ready(30.0)
        with pytest.raises(TeacherError, match="gave no answer: refused"):
            await client.handshake()


async def test_a_replica_that_answers_wrongly_is_refused_even_where_one_is_enough():
    wrong = ScriptedTeacher(manifest(revision="r2"))
    async with client_of(ScriptedTeacher(), wrong, require_all_replicas=False) as client:
        with pytest.raises(TeacherError, match="is two teachers"):
            await client.handshake()


async def test_a_replica_that_refuses_is_not_taken_for_absent():
    refusing = ScriptedTeacher()
    refusing.script("/v1/manifest", problem(401, "no key"))
    async with client_of(ScriptedTeacher(), refusing, require_all_replicas=False) as client:
        with pytest.raises(TeacherError, match="answered 401: no key"):
            await client.handshake()


async def test_a_replica_that_comes_later_is_held_against_the_manifest():
    late = absent()
    async with client_of(ScriptedTeacher(), late, require_all_replicas=False) as client:
        await client.handshake()
        late.scripts.clear()
        late.manifest = manifest(revision="r2")
        client.replicas[0].in_flight = 1  # so that the other one is asked
        with pytest.raises(DataError, match="teacher 'math' has changed: its manifest is"):
            await client.score([SEQUENCE], top_k=1)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "expected a list of at least one"),
        ("http://a", "expected a list of at least one"),
        (["a:8101"], "has url 'a:8101'; expected http://host:port"),
        (["http://a:port"], "has url 'http://a:port'; expected http://host:port"),
        (["http://[::1"], "expected http://host:port"),
        (["http://:8101"], "expected http://host:port"),
        (["http://a/?key=1"], "expected http://host:port"),
        (["http://a", "http://a/"], "has one url twice"),
    ],
)
def test_addresses_that_cannot_work_are_refused(urls, message):
    with pytest.raises(ConfigError, match=message):
        TeacherClient("math", urls)


@pytest.mark.parametrize("setting", ["timeout_seconds", "deadline_seconds", "max_concurrency"])
def test_limits_that_cannot_work_are_refused(setting):
    with pytest.raises(ConfigError, match=f"teacher 'math' has {setting} 0; expected more than 0"):
        TeacherClient("math", ["http://a"], **{setting: 0})


@pytest.mark.parametrize("key", ["line\n", "two words", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused_without_telling_it(key):
    with pytest.raises(ConfigError, match="has an api_key with characters") as told:
        TeacherClient("math", ["http://a"], api_key=key)
    assert key not in str(told.value)
