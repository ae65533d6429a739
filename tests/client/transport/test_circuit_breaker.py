"""Circuit breaker: a failing address is skipped, probed after a pause, and used again."""

import asyncio
import math

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_client.teacher_client import TeacherClient
from mopd_client.transport.circuit_breaker import FAILURES_TO_OPEN, PAUSE_SECONDS, CircuitBreaker
from mopd_client.transport.replica import Replica
from mopd_protocol.errors import DataError, TeacherError, TeacherUnavailableError
from mopd_protocol.requests import SequenceRequest
from tests.client.scripted_teacher import Scripted, ScriptedTeacher, manifest, network, problem
from tests.client.still_clock import StillClock, settle

pytestmark = pytest.mark.anyio

SEQUENCE = SequenceRequest(prompt="?", completion_token_ids=[70])
FAILURES: dict[str, Scripted] = {
    "no connection": httpx.ConnectError("refused"),
    "500": problem(500, "broken"),
    "503": problem(503, "loading"),
}
#: Responses of a working address, with any status.
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
        verify=0,
    )


async def score(client: TeacherClient, times: int = 1) -> int:
    """Number of successes among ``times`` calls."""
    successes = 0
    for _ in range(times):
        try:
            await client.score([SEQUENCE], top_k=1)
            successes += 1
        except TeacherError:
            pass
    return successes


def count(teacher: ScriptedTeacher) -> int:
    return len(teacher.requests_to("/v1/logprobs"))


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_replica_is_skipped_after_consecutive_failures_and_probed_after_a_pause(failure):
    first, second, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    first.script("/v1/logprobs", *[FAILURES[failure]] * 99)
    async with client_of(still, first=first, second=second) as client:
        await score(client, 20)
        assert count(first) == FAILURES_TO_OPEN
        assert client.counters.breaker_openings == 1

        still.seconds += PAUSE_SECONDS
        await score(client, 20)
        assert count(first) == FAILURES_TO_OPEN + 1  # the failed probe
        assert client.counters.breaker_openings == 1

        first.scripts.clear()
        still.seconds += PAUSE_SECONDS
        before = count(first)
        await score(client, 4)
        assert count(first) > before + 1  # the probe, and later requests


@pytest.mark.parametrize("sign", SIGNS_OF_LIFE)
async def test_a_response_resets_the_count_of_failures(sign):
    teacher, still = ScriptedTeacher(), StillClock()
    row: list[Scripted] = [problem(503, "loading")] * (FAILURES_TO_OPEN - 1)
    teacher.script("/v1/logprobs", *row, SIGNS_OF_LIFE[sign], *row)
    async with client_of(still, one=teacher) as client:
        await score(client, 2)

    assert client.counters.breaker_openings == 0


async def test_with_all_breakers_open_a_call_waits_for_the_first_to_half_open():
    first, second, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    async with client_of(still, first=first, second=second) as client:
        await client.handshake()
        for replica, half_open_at in zip(client.replicas, (40.0, 30.0), strict=True):
            open_breaker(replica, half_open_at)
        await client.score([SEQUENCE], top_k=1)

    assert still.pauses == [30.0]
    assert (count(first), count(second)) == (0, 1)


async def test_a_call_that_is_never_sent_reports_the_failure_of_earlier_calls():
    teacher, still = ScriptedTeacher(), StillClock()
    async with client_of(still, deadline_seconds=20.0, one=teacher) as client:
        await client.handshake()
        open_breaker(client.replicas[0], 30.0, "connection refused")
        with pytest.raises(TeacherUnavailableError, match="connection refused") as caught:
            await client.score([SEQUENCE], top_k=1)

    assert caught.value.status is None
    assert count(teacher) == 0


async def test_one_call_is_the_probe_and_other_calls_wait_for_its_response():
    teacher, still = ScriptedTeacher(), StillClock()
    gate = asyncio.Event()
    teacher.pause = gate.wait
    async with client_of(still, one=teacher) as client:
        await client.handshake()
        open_breaker(client.replicas[0], 5.0)
        calls = [asyncio.create_task(client.score([SEQUENCE], top_k=1)) for _ in range(6)]
        await settle()
        assert teacher.in_flight == 1
        gate.set()
        await asyncio.gather(*calls)

    assert count(teacher) == 6
    assert client.counters.failures == 0


async def test_after_a_cancelled_probe_the_next_call_is_the_probe():
    teacher, still = ScriptedTeacher(), StillClock()
    gate = asyncio.Event()
    teacher.pause = gate.wait
    async with client_of(still, one=teacher) as client:
        await client.handshake()
        open_breaker(client.replicas[0], 0.0)
        first = asyncio.create_task(client.score([SEQUENCE], top_k=1))
        await settle()
        second = asyncio.create_task(client.score([SEQUENCE], top_k=1))
        await settle()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        gate.set()
        assert len(await second) == 1


async def test_late_responses_to_requests_before_the_opening():
    breaker = CircuitBreaker(failures_to_open=1, pause_seconds=5.0)
    late, later = breaker.begin(), breaker.begin()
    breaker.fail(0.0, "x", probe=breaker.begin())
    assert breaker.available_at == 5.0
    probe = breaker.begin()
    assert (late, later, probe) == (False, False, True)

    breaker.fail(6.0, "y", probe=late)
    assert breaker.available_at == math.inf  # the probe is still in flight

    breaker.succeed()
    assert breaker.closed
    await asyncio.wait_for(breaker.probe_end(), 1.0)


@pytest.mark.parametrize("revision", ["r1", "r2"])
async def test_a_restarted_replica_is_used_again_only_if_it_is_the_same_teacher(revision):
    first, second, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    first.script("/v1/logprobs", *[httpx.ConnectError("restarting")] * FAILURES_TO_OPEN)
    async with client_of(still, first=first, second=second) as client:
        assert await score(client, 10) == 10
        first.manifest = manifest(revision=revision)
        still.seconds += PAUSE_SECONDS
        if revision == "r1":
            assert await score(client, 2) == 2
        else:
            with pytest.raises(DataError) as caught:
                await score(client, 2)
            assert caught.value.key == "manifest_id"

    assert count(first) > FAILURES_TO_OPEN


@given(
    st.lists(st.tuples(st.floats(0, 12), st.booleans()), max_size=40),
    st.integers(1, 4),
)
def test_availability_follows_from_the_history_of_responses(steps, failures_to_open):
    """Compare with the rule applied to the full history, for sequential calls."""
    breaker = CircuitBreaker(failures_to_open, pause_seconds=5.0)
    history: list[tuple[float, bool]] = []
    now = 0.0
    for seconds, success in steps:
        now += seconds
        expected = available_at(history, failures_to_open, 5.0)
        assert breaker.available_at == expected
        if now < expected:
            continue
        probe = breaker.begin()
        assert probe == (expected > -math.inf)
        if success:
            breaker.succeed()
        else:
            breaker.fail(now, "x", probe=probe)
        history.append((now, success))


def available_at(history: list[tuple[float, bool]], failures_to_open: int, pause: float) -> float:
    failures = 0
    for _, success in reversed(history):
        if success:
            break
        failures += 1
    return -math.inf if failures < failures_to_open else history[-1][0] + pause


def open_breaker(replica: Replica, half_open_at: float, failure: str = "refused") -> None:
    replica.breaker = CircuitBreaker(failures_to_open=1, pause_seconds=half_open_at)
    replica.breaker.fail(0.0, failure, probe=False)
