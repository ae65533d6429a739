"""What is tried again, when, where, and how it ends."""

import asyncio
import itertools

import httpx
import pytest

from mopd_client.teacher_client import TeacherClient
from mopd_client.transport.attempt import Attempts
from mopd_client.transport.clock import Clock
from mopd_client.transport.counters import Counters
from mopd_client.transport.replica import Replica, least_busy
from mopd_client.transport.retry import send_with_retries
from mopd_protocol.errors import TeacherError
from mopd_protocol.requests import SequenceRequest
from tests.client.scripted_teacher import Scripted, ScriptedTeacher, network, problem
from tests.client.still_clock import StillClock

pytestmark = pytest.mark.anyio

SEQUENCE = SequenceRequest(prompt="?", completion_token_ids=[70, 71])
PASSING: dict[str, Scripted] = {
    "429": problem(429, "the queue is full"),
    "502": httpx.Response(502, text="bad gateway"),
    "503": problem(503, "still loading"),
    "504": httpx.Response(504),
    "no connection": httpx.ConnectError("refused"),
    "cut connection": httpx.RemoteProtocolError("peer closed connection"),
    "read timeout": httpx.ReadTimeout("slow"),
    "no room in the pool": httpx.PoolTimeout("busy"),
    "unreadable encoding": httpx.DecodingError("not gzip"),
}
FINAL = [400, 401, 403, 404, 405, 408, 409, 413, 422, 431, 499, 500, 501, 505, 204, 302]


def client_of(
    teacher: ScriptedTeacher, still: StillClock, *, deadline_seconds: float = 60.0
) -> TeacherClient:
    return TeacherClient(
        "math",
        ["http://math"],
        deadline_seconds=deadline_seconds,
        transport=network(math=teacher),
        clock=still.clock,
    )


@pytest.mark.parametrize("failure", PASSING)
async def test_a_passing_failure_is_tried_again(failure):
    teacher, still = ScriptedTeacher(), StillClock()
    teacher.script("/v1/logprobs", PASSING[failure])
    async with client_of(teacher, still) as client:
        [score] = await client.score([SEQUENCE], top_k=1)

    assert score.completion.token_ids.tolist() == [70, 71]
    first, second = teacher.asked_for("/v1/logprobs")
    assert first.body == second.body
    assert still.sleeps == [0.25]
    assert (client.counters.retries, client.counters.failures) == (1, 0)


@pytest.mark.parametrize("status", FINAL)
async def test_any_other_status_is_told_and_not_tried_again(status):
    teacher, still = ScriptedTeacher(), StillClock()
    teacher.script("/v1/logprobs", problem(status, "no, because"))
    async with client_of(teacher, still) as client:
        with pytest.raises(
            TeacherError, match=f"teacher 'math' answered {status}: no, bec"
        ) as told:
            await client.score([SEQUENCE], top_k=1)

    assert told.value.status == status
    assert len(teacher.asked_for("/v1/logprobs")) == 1
    assert still.sleeps == []
    assert (client.counters.retries, client.counters.failures) == (0, 1)


@pytest.mark.parametrize("path", ["/v1/manifest", "/v1/tokenizer"])
async def test_questions_about_the_teacher_are_tried_again_too(path):
    teacher, still = ScriptedTeacher(), StillClock()
    teacher.script(path, httpx.ConnectError("refused"), problem(503, "loading"))
    async with client_of(teacher, still) as client:
        await client.tokenizer()

    assert len(teacher.asked_for(path)) == 3
    assert client.counters.retries == 0  # counters are about scoring


async def test_pauses_double_up_to_a_longest_one():
    teacher, still = ScriptedTeacher(), StillClock()
    # Busy is not broken: a breaker has its own pauses.
    teacher.script("/v1/logprobs", *[problem(429, "full") for _ in range(9)])
    async with client_of(teacher, still, deadline_seconds=1000) as client:
        await client.score([SEQUENCE], top_k=1)

    assert still.sleeps == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


async def test_chance_shortens_a_pause_by_up_to_half():
    teacher, still = ScriptedTeacher(), StillClock(chance=0.5)
    teacher.script("/v1/logprobs", problem(503, "loading"))
    async with client_of(teacher, still) as client:
        await client.score([SEQUENCE], top_k=1)

    assert still.sleeps == [0.25 * 0.75]


async def test_retry_after_is_honoured():
    teacher, still = ScriptedTeacher(), StillClock()
    teacher.script("/v1/logprobs", problem(429, "full", **{"retry-after": "7"}))
    async with client_of(teacher, still) as client:
        await client.score([SEQUENCE], top_k=1)

    assert still.sleeps == [7.0]


@pytest.mark.parametrize("header", ["soon", "", "-3", "Wed, 21 Oct 2026 07:28:00 GMT", "0"])
async def test_a_retry_after_that_is_no_number_of_seconds_leaves_the_ordinary_pause(header):
    teacher, still = ScriptedTeacher(), StillClock()
    teacher.script("/v1/logprobs", problem(503, "loading", **{"retry-after": header}))
    async with client_of(teacher, still) as client:
        await client.score([SEQUENCE], top_k=1)

    assert still.sleeps == [0.25]


async def test_the_deadline_ends_with_the_last_failure_in_a_sentence():
    teacher, still = ScriptedTeacher(), StillClock()
    teacher.script("/v1/logprobs", httpx.ConnectError("refused"))
    teacher.script("/v1/logprobs", *[problem(503, "still loading") for _ in range(20)])
    async with client_of(teacher, still, deadline_seconds=10) as client:
        with pytest.raises(TeacherError) as told:
            await client.score([SEQUENCE], top_k=1)

    assert str(told.value) == (
        "teacher 'math' answered 503: still loading (gave up after 6 attempts within 10 s)"
    )
    assert told.value.status == 503
    assert still.seconds < 10
    assert (client.counters.retries, client.counters.failures) == (5, 1)


async def test_without_any_answer_the_deadline_ends_with_what_went_wrong():
    still = StillClock()
    client = TeacherClient("code", ["http://code"], transport=network(), clock=still.clock)
    async with client:
        with pytest.raises(
            TeacherError, match="teacher 'code' gave no answer: no host code"
        ) as told:
            await client.handshake()

    assert told.value.status is None


@pytest.mark.parametrize("seconds", ["3600", "9" * 400])  # the latter is infinite as a float
async def test_a_retry_after_beyond_the_deadline_ends_at_once(seconds):
    teacher, still = ScriptedTeacher(), StillClock()
    teacher.script("/v1/logprobs", problem(503, "draining", **{"retry-after": seconds}))
    async with client_of(teacher, still) as client:
        with pytest.raises(TeacherError, match=r"draining \(gave up after 1 attempts within 60 s"):
            await client.score([SEQUENCE], top_k=1)

    assert still.sleeps == []


async def test_an_attempt_that_takes_too_long_is_a_passing_failure():
    still = StillClock()
    attempts = itertools.count()

    async def stuck_once(replica: Replica) -> httpx.Response:
        if next(attempts) == 0:
            await _forever()
        return httpx.Response(200)

    response = await _send([Replica("http://math")], stuck_once, still.clock, timeout=0.01)

    assert response.status_code == 200
    assert still.sleeps == [0.25]


@pytest.mark.parametrize(("timeout", "deadline", "failures"), [(60.0, 0.01, 0), (0.01, 0.01, 1)])
async def test_a_deadline_that_leaves_little_time_says_nothing_about_the_replica(
    timeout, deadline, failures
):
    async def stuck(replica: Replica) -> httpx.Response:
        await _forever()
        raise AssertionError

    replica = Replica("http://math")
    with pytest.raises(TeacherError, match="gave no answer"):
        await _send([replica], stuck, StillClock().clock, timeout=timeout, deadline=deadline)
    assert replica.breaker.failures == failures


async def test_a_bug_in_the_client_is_not_tried_again():
    async def broken(replica: Replica) -> httpx.Response:
        raise KeyError(replica.url)

    replica = Replica("http://math")
    with pytest.raises(KeyError):
        await _send([replica], broken, StillClock().clock)
    assert replica.in_flight == 0


async def test_a_retry_goes_to_another_replica():
    one, other, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    one.script("/v1/logprobs", httpx.ConnectError("refused"))
    async with _two_replicas(one, other, still) as client:
        await client.score([SEQUENCE], top_k=1)

    assert len(one.asked_for("/v1/logprobs")) == 1
    assert len(other.asked_for("/v1/logprobs")) == 1


async def test_a_replica_that_asked_for_time_is_left_alone_while_another_answers():
    one, other, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    one.script("/v1/logprobs", problem(429, "full", **{"retry-after": "30"}))
    async with _two_replicas(one, other, still) as client:
        for _ in range(3):
            await client.score([SEQUENCE], top_k=1)
        assert len(one.asked_for("/v1/logprobs")) == 1
        assert still.sleeps == [0.25]

        still.seconds += 30
        await client.score([SEQUENCE], top_k=1)

    assert len(one.asked_for("/v1/logprobs")) == 2


async def test_when_every_replica_asked_for_time_the_first_to_be_free_is_waited_for():
    one, other, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    one.script("/v1/logprobs", problem(429, "full", **{"retry-after": "30"}))
    other.script("/v1/logprobs", problem(429, "full", **{"retry-after": "9"}))
    async with _two_replicas(one, other, still) as client:
        await client.score([SEQUENCE], top_k=1)

    assert still.sleeps == [0.25, 9.0]
    assert len(other.asked_for("/v1/logprobs")) == 2


async def test_the_least_busy_replica_is_asked():
    idle, busy = Replica("http://a", in_flight=1), Replica("http://b", in_flight=2)
    resting = Replica("http://c", not_before=5.0)

    assert least_busy([busy, idle, resting], now=1.0, failed=None) is idle
    assert least_busy([busy, idle, resting], now=1.0, failed=idle) is busy
    assert least_busy([busy, idle, resting], now=5.0, failed=None) is resting
    assert least_busy([resting], now=1.0, failed=resting) is resting


def _two_replicas(one: ScriptedTeacher, other: ScriptedTeacher, still: StillClock) -> TeacherClient:
    return TeacherClient(
        "math",
        ["http://one", "http://other"],
        transport=network(one=one, other=other),
        clock=still.clock,
    )


async def _send(
    replicas, send, clock: Clock, *, timeout: float = 60.0, deadline: float = 60.0
) -> httpx.Response:
    return await send_with_retries(
        replicas,
        send,
        attempts=Attempts("math", timeout, clock, Counters()),
        deadline_seconds=deadline,
    )


async def _forever() -> None:
    await asyncio.Event().wait()
