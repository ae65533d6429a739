"""Scoring requests, and the responses that are accepted."""

import asyncio
from collections import deque
from dataclasses import replace
from typing import Any

import httpx
import pytest

from mopd_client.teacher_client import TeacherClient
from mopd_client.transport.counters import MOST_DURATIONS, Counters, ReplicaCounts
from mopd_protocol.codec import BINARY_MEDIA_TYPE
from mopd_protocol.errors import ConfigError, DataError, TeacherError
from mopd_protocol.manifest import MANIFEST_HEADER
from mopd_protocol.requests import ControlToken, SequenceRequest
from mopd_protocol.samples import Message
from tests.client.scripted_teacher import ScriptedTeacher, manifest, network, problem
from tests.client.still_clock import StillClock, settle

pytestmark = pytest.mark.anyio


def client_of(teacher: ScriptedTeacher, **settings: Any) -> TeacherClient:
    still = StillClock()
    return TeacherClient(
        "math",
        ["http://math"],
        clock=still.clock,
        **{"transport": network(math=teacher), "verify": 0, **settings},
    )


def sequence(*token_ids: int, name: str | None = None) -> SequenceRequest:
    return SequenceRequest(id=name, prompt="?", completion_token_ids=list(token_ids))


async def test_scores_have_the_order_of_the_sequences():
    async with client_of(ScriptedTeacher()) as client:
        scores = await client.score([sequence(70, 71), sequence(), sequence(72)], top_k=1)

    assert [score.completion.token_ids.tolist() for score in scores] == [[70, 71], [], [72]]
    assert {score.manifest_id for score in scores} == {manifest().manifest_id}


async def test_all_fields_of_a_request_are_sent():
    teacher = ScriptedTeacher()
    full = SequenceRequest(
        id="a",
        messages=[Message(role="user", content="3 + 4 =")],
        completion=["7", ControlToken(control="<think>")],
        finished=True,
        candidate_ids=[[5, 6], []],
    )
    teacher.script("/v1/logprobs", problem(422, "unknown control token"))
    async with client_of(teacher) as client:
        with pytest.raises(TeacherError):
            await client.score([full], top_k=12, temperature=0.7, logprobs_dtype="float16")

    [request] = teacher.requests_to("/v1/logprobs")
    assert request.method == "POST"
    assert request.headers["accept"] == BINARY_MEDIA_TYPE
    assert request.headers["content-type"] == "application/json"
    assert request.body["sequences"][0].pop("id") not in ("a", "")
    assert request.body == {
        "sequences": [
            {
                "messages": [{"role": "user", "content": "3 + 4 ="}],
                "completion": ["7", {"control": "<think>"}],
                "finished": True,
                "candidate_ids": [[5, 6], []],
            }
        ],
        "top_k": 12,
        "temperature": 0.7,
        "logprobs_dtype": "float16",
    }


async def test_defaults_are_sent():
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        await client.score([sequence(70)], top_k=3)

    [request] = teacher.requests_to("/v1/logprobs")
    assert (request.body["temperature"], request.body["logprobs_dtype"]) == (1.0, "float32")
    assert request.body["top_k"] == 3


async def test_no_sequences_need_no_request():
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        assert await client.score([], top_k=1) == []

    assert teacher.requests == []


async def test_concurrent_first_calls_share_one_handshake():
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        await asyncio.gather(*[client.score([sequence(70)], top_k=1) for _ in range(5)])

    assert len(teacher.requests_to("/v1/manifest")) == 1


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": 1, "temperature": 0.0}])
async def test_an_invalid_request_raises_before_it_is_sent(settings):
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        with pytest.raises(ConfigError):
            await client.score([sequence(70)], **settings)

    assert teacher.requests == []


async def test_a_teacher_that_changes_between_requests_raises_a_data_error():
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        await client.score([sequence(70)], top_k=1)
        teacher.manifest = manifest(revision="r2")
        with pytest.raises(DataError, match=teacher.manifest.manifest_id[:12]) as caught:
            await client.score([sequence(70)], top_k=1)

    assert caught.value.key == "manifest_id"


async def test_a_rejection_has_the_status_and_the_detail():
    teacher = ScriptedTeacher()
    detail = "the prompt and completion are 600 tokens, the limit is 512"
    teacher.script("/v1/logprobs", problem(413, detail))
    async with client_of(teacher) as client:
        with pytest.raises(TeacherError, match=f"'math' .*413: {detail}$") as caught:
            await client.score([sequence(70)], top_k=1)

    assert caught.value.status == 413


@pytest.mark.parametrize("own", [False, True])
async def test_a_500_of_a_proxy_is_retried_and_one_of_the_teacher_is_not(own: bool):
    teacher = ScriptedTeacher()
    headers = {MANIFEST_HEADER: teacher.manifest.manifest_id} if own else {}
    failures = [httpx.Response(500, text="Internal Server Error", headers=headers)] * 2

    async def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/logprobs" and failures:
            return failures.pop()
        return await teacher.respond(request)

    async with client_of(teacher, transport=httpx.MockTransport(respond)) as client:
        if own:
            with pytest.raises(TeacherError) as caught:
                await client.score([sequence(70)], top_k=1)
            assert caught.value.status == 500
        else:
            assert len(await client.score([sequence(70)], top_k=1)) == 1
        assert client.counters.retries == (0 if own else 2)


async def test_concurrency_is_limited():
    teacher = ScriptedTeacher()
    gate = asyncio.Event()
    teacher.pause = gate.wait
    async with client_of(teacher, max_concurrency=3) as client:
        await client.handshake()
        calls = [asyncio.create_task(client.score([sequence(70)], top_k=1)) for _ in range(10)]
        await settle()
        assert teacher.in_flight == 3
        gate.set()
        await asyncio.gather(*calls)

    assert teacher.most_in_flight == 3
    assert len(teacher.requests_to("/v1/logprobs")) == 10


async def test_calls_spread_evenly_over_replicas():
    teachers = {host: ScriptedTeacher() for host in ("a", "b", "c")}
    gate = asyncio.Event()
    for teacher in teachers.values():
        teacher.pause = gate.wait
    client = TeacherClient(
        "math",
        [f"http://{host}" for host in teachers],
        transport=network(**teachers),
        verify=0,
    )
    async with client:
        await client.handshake()
        calls = [asyncio.create_task(client.score([sequence(70)], top_k=1)) for _ in range(7)]
        await settle()
        assert sorted(teacher.in_flight for teacher in teachers.values()) == [2, 2, 3]
        gate.set()
        await asyncio.gather(*calls)

    assert [replica.in_flight for replica in client.replicas] == [0, 0, 0]


async def test_a_cancelled_call_frees_its_slot_and_its_replica():
    teacher = ScriptedTeacher()
    gate = asyncio.Event()
    teacher.pause = gate.wait
    async with client_of(teacher, max_concurrency=1) as client:
        await client.handshake()
        call = asyncio.create_task(client.score([sequence(70)], top_k=1))
        await settle()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client.replicas[0].in_flight == 0
        gate.set()
        assert len(await client.score([sequence(70)], top_k=1)) == 1


async def test_counters():
    teacher = ScriptedTeacher()
    teacher.script("/v1/logprobs", problem(503, "loading"), problem(503, "loading"))
    async with client_of(teacher) as client:
        await client.score([sequence(70, 71), sequence(72)], top_k=1)
        teacher.script("/v1/logprobs", problem(413, "too long"))
        with pytest.raises(TeacherError):
            await client.score([sequence(70)], top_k=1)

    totals = client.counters.pop()
    assert totals.received_bytes > 3 * 8  # an id and a log-probability per token, and the header
    assert replace(totals, received_bytes=0, seconds=deque()) == Counters(
        requests=2,
        retries=2,
        failures=1,
        tokens_scored=3,
        # A prompt of one token each; the second call was rejected.
        replicas={"http://math": ReplicaCounts(requests=4, tokens=5, failures=2)},
    )
    assert list(totals.seconds) == [0.75]
    assert client.counters == Counters()
    client.counters.seconds.extend(range(MOST_DURATIONS + 1))
    assert (len(client.counters.seconds), list(totals.seconds)) == (MOST_DURATIONS, [0.75])
