"""An address that fails in a row is left alone, asked once in a while, and used again."""

import asyncio
import math

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_client.teacher_client import TeacherClient
from mopd_client.transport.circuit_breaker import FAILURES_TO_OPEN, PAUSE_SECONDS, CircuitBreaker
from mopd_client.transport.replica import Replica, spare
from mopd_protocol.errors import DataError, TeacherError
from mopd_protocol.requests import SequenceRequest
from tests.client.scripted_teacher import Scripted, ScriptedTeacher, manifest, network, problem
from tests.client.still_clock import StillClock

pytestmark = pytest.mark.anyio

SEQUENCE = SequenceRequest(prompt="?", completion_token_ids=[70])
FAILURES: dict[str, Scripted] = {
    "no connection": httpx.ConnectError("refused"),
    "500": problem(500, "broken"),
    "503": problem(503, "loading"),
}
#: Answers that show a working address, whatever they say about the request.
SIGNS_OF_LIFE: dict[str, Scripted] = {
    "413": problem(413, "too long"),
    "429": problem(429, "the queue is full"),
}


def client_of(still: StillClock, deadline_seconds: float = 60.0, **hosts: ScriptedTeacher):
    return TeacherClient(
        "math",
        [f"http://{host}" for host in hosts],
        deadline_seconds=deadline_seconds,
        transport=network(**hosts),
        clock=still.clock,
    )


async def ask(client: TeacherClient, times: int = 1) -> int:
    """How many of ``times`` calls were answered."""
    answered = 0
    for _ in range(times):
        try:
            await client.score([SEQUENCE], top_k=1)
            answered += 1
        except TeacherError:
            pass
    return answered


def asked(teacher: ScriptedTeacher) -> int:
    return len(teacher.asked_for("/v1/logprobs"))


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_replica_that_fails_in_a_row_is_left_alone_for_a_while(failure):
    one, other, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    one.script("/v1/logprobs", *[FAILURES[failure]] * 99)
    async with client_of(still, one=one, other=other) as client:
        await ask(client, 20)
        assert asked(one) == FAILURES_TO_OPEN
        assert client.counters.breaker_openings == 1

        still.seconds += PAUSE_SECONDS
        await ask(client, 20)
        assert asked(one) == FAILURES_TO_OPEN + 1  # the probe, which failed
        assert client.counters.breaker_openings == 1

        one.scripts.clear()
        still.seconds += PAUSE_SECONDS
        before = asked(one)
        await ask(client, 4)
        assert asked(one) > before + 1  # the probe, and then as before


@pytest.mark.parametrize("sign", SIGNS_OF_LIFE)
async def test_an_answer_ends_the_row_of_failures(sign):
    teacher, still = ScriptedTeacher(), StillClock()
    row: list[Scripted] = [problem(503, "loading")] * (FAILURES_TO_OPEN - 1)
    teacher.script("/v1/logprobs", *row, SIGNS_OF_LIFE[sign], *row)
    async with client_of(still, one=teacher) as client:
        await ask(client, 2)

    assert client.counters.breaker_openings == 0


async def test_when_every_replica_is_left_alone_the_first_to_half_open_is_waited_for():
    one, other, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    async with client_of(still, one=one, other=other) as client:
        await client.handshake()
        for replica, half_open_at in zip(client.replicas, (40.0, 30.0), strict=True):
            opened(replica, half_open_at)
        await client.score([SEQUENCE], top_k=1)

    assert still.sleeps == [30.0]
    assert (asked(one), asked(other)) == (0, 1)


async def test_a_call_that_no_replica_may_take_in_time_tells_what_others_met():
    teacher, still = ScriptedTeacher(), StillClock()
    async with client_of(still, deadline_seconds=20.0, one=teacher) as client:
        await client.handshake()
        opened(client.replicas[0], 30.0, "connection refused")
        with pytest.raises(TeacherError) as told:
            await client.score([SEQUENCE], top_k=1)

    assert "teacher 'math' gave no answer: connection refused, as other calls found" in str(
        told.value
    )
    assert told.value.status is None
    assert asked(teacher) == 0


async def test_one_call_is_the_probe_and_the_others_wait_for_its_answer():
    teacher, still = ScriptedTeacher(), StillClock()
    gate = asyncio.Event()
    teacher.pause = gate.wait
    async with client_of(still, one=teacher) as client:
        await client.handshake()
        opened(client.replicas[0], 5.0)
        calls = [asyncio.create_task(client.score([SEQUENCE], top_k=1)) for _ in range(6)]
        await settle()
        assert teacher.in_flight == 1
        gate.set()
        await asyncio.gather(*calls)

    assert asked(teacher) == 6
    assert client.counters.failures == 0


async def test_a_cancelled_probe_leaves_its_place_to_the_next_call():
    teacher, still = ScriptedTeacher(), StillClock()
    gate = asyncio.Event()
    teacher.pause = gate.wait
    async with client_of(still, one=teacher) as client:
        await client.handshake()
        opened(client.replicas[0], 0.0)
        first = asyncio.create_task(client.score([SEQUENCE], top_k=1))
        await settle()
        second = asyncio.create_task(client.score([SEQUENCE], top_k=1))
        await settle()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        gate.set()
        assert len(await second) == 1


async def test_a_late_answer_from_before_the_opening_closes_and_does_not_end_the_probe():
    breaker = CircuitBreaker(failures_to_open=1, pause_seconds=5.0)
    late, later = breaker.begin(), breaker.begin()
    breaker.fail(0.0, "x", probe=breaker.begin())
    assert breaker.free_at == 5.0
    probe = breaker.begin()
    assert (late, later, probe) == (False, False, True)

    breaker.fail(6.0, "y", probe=late)
    assert breaker.free_at == math.inf  # the probe is still under way

    breaker.succeed()
    assert breaker.closed
    await asyncio.wait_for(breaker.probe_end(), 1.0)


async def test_a_replica_that_restarts_as_the_same_teacher_is_used_again():
    one, other, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    one.script("/v1/logprobs", *[httpx.ConnectError("restarting")] * FAILURES_TO_OPEN)
    async with client_of(still, one=one, other=other) as client:
        assert await ask(client, 10) == 10
        still.seconds += PAUSE_SECONDS
        assert await ask(client, 2) == 2

    assert asked(one) > FAILURES_TO_OPEN


async def test_one_replica_that_restarts_as_another_teacher_ends_the_run():
    one, other, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    one.script("/v1/logprobs", *[httpx.ConnectError("restarting")] * FAILURES_TO_OPEN)
    async with client_of(still, one=one, other=other) as client:
        await ask(client, 10)
        one.manifest = manifest(revision="r2")
        still.seconds += PAUSE_SECONDS
        with pytest.raises(DataError, match="teacher 'math' has changed: its manifest is"):
            await ask(client, 2)


def test_a_second_request_goes_to_no_replica_that_is_left_alone():
    asked_first, broken, resting = (Replica(f"http://{host}") for host in "abc")
    opened(broken, 0.0)
    resting.not_before = 9.0

    assert spare([asked_first, broken, resting], now=5.0, asked=asked_first) is None
    assert spare([asked_first, broken, resting], now=9.0, asked=asked_first) is resting


@given(
    st.lists(st.tuples(st.floats(0, 12), st.booleans()), max_size=40),
    st.integers(1, 4),
)
def test_it_is_free_as_the_history_of_answers_says(steps, failures_to_open):
    """Against the rule read off the whole history, for one caller after another."""
    breaker = CircuitBreaker(failures_to_open, pause_seconds=5.0)
    history: list[tuple[float, bool]] = []
    now = 0.0
    for seconds, answered in steps:
        now += seconds
        expected = free_from(history, failures_to_open, 5.0)
        assert breaker.free_at == expected
        if now < expected:
            continue
        probe = breaker.begin()
        assert probe == (expected > -math.inf)
        if answered:
            breaker.succeed()
        else:
            breaker.fail(now, "x", probe=probe)
        history.append((now, answered))


def free_from(history: list[tuple[float, bool]], failures_to_open: int, pause: float) -> float:
    row = 0
    for _, answered in reversed(history):
        if answered:
            break
        row += 1
    return -math.inf if row < failures_to_open else history[-1][0] + pause


def opened(replica: Replica, half_open_at: float, failure: str = "refused") -> None:
    """Leaves the replica alone until then."""
    replica.breaker = CircuitBreaker(failures_to_open=1, pause_seconds=half_open_at)
    replica.breaker.fail(0.0, failure, probe=False)


async def settle() -> None:
    """Lets every task run until all of them wait for something."""
    for _ in range(50):
        await asyncio.sleep(0)
