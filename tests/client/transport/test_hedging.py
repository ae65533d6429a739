"""A question that is slow to be answered is asked a second time elsewhere; the sooner counts."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_client.teacher_client import TeacherClient
from mopd_client.transport.clock import Clock
from mopd_client.transport.hedging import Hedging, Latencies, quantile
from mopd_protocol.errors import ConfigError, TeacherError
from mopd_protocol.requests import SequenceRequest
from tests.client.scripted_teacher import ScriptedTeacher, network, problem
from tests.client.still_clock import StillClock

pytestmark = pytest.mark.anyio

SEQUENCE = SequenceRequest(prompt="?", completion_token_ids=[70])


def client_of(clock: Clock, **teachers: Any) -> TeacherClient:
    hedging = teachers.pop("hedging", Hedging(after_seconds=2.0))
    return TeacherClient(
        "math",
        [f"http://{host}" for host in teachers],
        hedging=hedging,
        transport=network(**teachers),
        clock=clock,
    )


def slow() -> tuple[ScriptedTeacher, asyncio.Event]:
    """A teacher that answers when its event is set, and the event."""
    gate = asyncio.Event()
    return ScriptedTeacher(pause=gate.wait), gate


def asked(*teachers: ScriptedTeacher) -> list[int]:
    return [len(teacher.asked_for("/v1/logprobs")) for teacher in teachers]


async def test_a_slow_first_request_is_cancelled_when_the_second_is_answered():
    (one, _), other, still = slow(), ScriptedTeacher(), StillClock()
    async with client_of(still.clock, one=one, other=other) as client:
        [score] = await client.score([SEQUENCE], top_k=1)
        assert [replica.in_flight for replica in client.replicas] == [0, 0]

    assert score.completion.token_ids.tolist() == [70]
    assert asked(one, other) == [1, 1]
    assert one.in_flight == 0  # it was told that nobody waits any more
    assert one.asked_for("/v1/logprobs")[0].body == other.asked_for("/v1/logprobs")[0].body
    assert still.sleeps == [2.0]
    counters = client.counters
    assert (counters.hedges_won, counters.hedges_lost, counters.retries) == (1, 0, 0)
    assert (counters.requests, len(counters.seconds)) == (1, 1)


async def test_a_first_request_that_is_answered_after_all_is_taken():
    (one, first), (other, _), still = slow(), slow(), StillClock()
    async with client_of(still.clock, one=one, other=other) as client:
        await client.handshake()
        call = asyncio.create_task(client.score([SEQUENCE], top_k=1))
        await until(lambda: other.in_flight == 1)
        first.set()
        await call

    assert other.in_flight == 0
    assert (client.counters.hedges_won, client.counters.hedges_lost) == (0, 1)


async def test_a_question_that_is_answered_in_time_is_asked_once():
    async def never(seconds: float) -> None:
        await asyncio.Event().wait()

    one, other = ScriptedTeacher(), ScriptedTeacher()
    async with client_of(Clock(now=lambda: 0.0, sleep=never), one=one, other=other) as client:
        await client.score([SEQUENCE], top_k=1)

    assert sum(asked(one, other)) == 1
    assert (client.counters.hedges_won, client.counters.hedges_lost) == (0, 0)


async def test_a_second_request_that_fails_leaves_the_first_to_answer():
    (one, first), other, still = slow(), ScriptedTeacher(), StillClock()
    other.script("/v1/logprobs", problem(503, "loading"))
    async with client_of(still.clock, one=one, other=other) as client:
        await client.handshake()
        call = asyncio.create_task(client.score([SEQUENCE], top_k=1))
        await until(lambda: client.replicas[1].breaker.failures == 1)
        await settle()
        assert one.in_flight == 1  # the failure has not ended it
        first.set()
        await call

    assert asked(one, other) == [1, 1]
    assert (client.counters.hedges_lost, client.counters.retries) == (1, 0)


async def test_when_both_requests_fail_the_question_is_asked_again():
    one, other, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    gate = asyncio.Event()

    async def cut_after_all() -> None:
        await gate.wait()
        one.pause = None
        raise httpx.ReadError("cut")

    one.pause = cut_after_all
    other.script("/v1/logprobs", problem(503, "loading"))
    async with client_of(still.clock, one=one, other=other) as client:
        await client.handshake()
        call = asyncio.create_task(client.score([SEQUENCE], top_k=1))
        await until(lambda: client.replicas[1].breaker.failures == 1)
        await settle()
        gate.set()
        assert len(await call) == 1

    assert (client.counters.retries, client.counters.failures) == (1, 0)
    assert still.sleeps[:2] == [2.0, 0.25]


async def test_a_refusal_counts_as_an_answer():
    (one, _), other, still = slow(), ScriptedTeacher(), StillClock()
    other.script("/v1/logprobs", problem(413, "too long"))
    async with client_of(still.clock, one=one, other=other) as client:
        with pytest.raises(TeacherError, match="413: too long"):
            await client.score([SEQUENCE], top_k=1)

    assert client.counters.hedges_won == 1


async def test_one_replica_is_never_asked_twice_at_once():
    (one, gate), still = slow(), StillClock()
    async with client_of(still.clock, one=one) as client:
        await client.handshake()
        call = asyncio.create_task(client.score([SEQUENCE], top_k=1))
        await until(lambda: one.in_flight == 1)
        gate.set()
        await call

    assert asked(one) == [1]


async def test_a_cancelled_call_cancels_both_requests():
    (one, _), (other, _), still = slow(), slow(), StillClock()
    async with client_of(still.clock, one=one, other=other) as client:
        await client.handshake()
        call = asyncio.create_task(client.score([SEQUENCE], top_k=1))
        await until(lambda: one.in_flight == other.in_flight == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    assert (one.in_flight, other.in_flight) == (0, 0)


async def test_a_quantile_of_past_latencies_sets_the_delay():
    one, other, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    hedging = Hedging(after_quantile=0.9)

    async def takes_three_seconds() -> None:
        still.seconds += 3.0

    one.pause = other.pause = takes_three_seconds
    async with client_of(still.clock, one=one, other=other, hedging=hedging) as client:
        for _ in range(20):
            await client.score([SEQUENCE], top_k=1)
        assert still.sleeps == []  # too few answers to know
        await client.score([SEQUENCE], top_k=1)

    assert still.sleeps == [3.0]


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 0.99))
def test_a_quantile_is_the_least_value_that_enough_do_not_exceed(values, q):
    found = quantile(sorted(values), q)

    assert found in values
    assert sum(value <= found for value in values) > q * len(values) - 1e-9
    lower = [value for value in values if value < found]
    assert len(lower) <= q * len(values)


def test_without_settings_there_is_no_second_request():
    latencies = Latencies()
    latencies.seconds.extend([1.0] * 100)

    assert latencies.hedge_delay(Hedging()) is None
    assert latencies.hedge_delay(Hedging(after_seconds=4.0)) == 4.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"after_seconds": 1.0, "after_quantile": 0.9}, "are both set; expected one of them"),
        ({"after_seconds": 0.0}, "hedge_after_seconds is 0.0; expected more than 0"),
        ({"after_quantile": 1.0}, "hedge_after_quantile is 1.0; expected it between 0 and 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Hedging(**settings)


async def until(condition: Callable[[], bool]) -> None:
    """Lets tasks run until the condition holds."""
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the tasks stand still")


async def settle() -> None:
    """Lets every task run until all of them wait for something."""
    for _ in range(50):
        await asyncio.sleep(0)
