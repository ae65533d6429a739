"""Transient failures are retried until the deadline; other responses are final."""

import asyncio
import itertools
import ssl

import httpx
import pytest

from mopd_client.teacher_client import TeacherClient
from mopd_client.transport.clock import Clock
from mopd_client.transport.counters import Counters
from mopd_client.transport.discovery import Replicas
from mopd_client.transport.replica import Replica
from mopd_client.transport.retry import Attempts, send_with_retries
from mopd_protocol.errors import TeacherError, TeacherUnavailableError
from mopd_protocol.requests import SequenceRequest
from tests.client.scripted_teacher import Scripted, ScriptedTeacher, network, problem
from tests.client.still_clock import StillClock

pytestmark = pytest.mark.anyio

SEQUENCE = SequenceRequest(prompt="?", completion_token_ids=[70, 71])
TRANSIENT: dict[str, Scripted] = {
    "429": problem(429, "the queue is full"),
    "502": httpx.Response(502, text="bad gateway"),
    "503": problem(503, "still loading"),
    "504": httpx.Response(504),
    "no connection": httpx.ConnectError("refused"),
    "cut connection": httpx.RemoteProtocolError("peer closed connection"),
    "read timeout": httpx.ReadTimeout("slow"),
    "no room in the pool": httpx.PoolTimeout("busy"),
    "invalid encoding": httpx.DecodingError("not gzip"),
}
FINAL = [400, 401, 403, 404, 405, 408, 409, 413, 422, 431, 499, 500, 501, 505, 204, 302]


def client_of(
    still: StillClock, deadline_seconds: float = 60.0, **teachers: ScriptedTeacher
) -> TeacherClient:
    return TeacherClient(
        "math",
        [f"http://{host}" for host in teachers],
        deadline_seconds=deadline_seconds,
        transport=network(**teachers),
        clock=still.clock,
        verify=0,
    )


async def pauses_of_one_call(*failures: Scripted, random: float = 0.0) -> list[float]:
    """Pauses of a call that fails with ``failures`` and succeeds in the end."""
    teacher, still = ScriptedTeacher(), StillClock(random=random)
    teacher.script("/v1/logprobs", *failures)
    async with client_of(still, 1000.0, math=teacher) as client:
        [score] = await client.score([SEQUENCE], top_k=1)

    assert score.token_ids.tolist() == [70, 71]
    bodies = [request.body for request in teacher.requests_to("/v1/logprobs")]
    assert bodies == [bodies[0]] * (len(failures) + 1)
    assert (client.counters.retries, client.counters.failures) == (len(failures), 0)
    return still.pauses


@pytest.mark.parametrize("failure", TRANSIENT)
async def test_a_transient_failure_is_retried(failure):
    assert await pauses_of_one_call(TRANSIENT[failure]) == [0.25]


@pytest.mark.parametrize("status", FINAL)
async def test_any_other_status_is_final(status):
    teacher, still = ScriptedTeacher(), StillClock()
    teacher.script("/v1/logprobs", problem(status, "no, because"))
    async with client_of(still, math=teacher) as client:
        with pytest.raises(TeacherError, match="no, because") as caught:
            await client.score([SEQUENCE], top_k=1)

    assert caught.value.status == status
    assert not isinstance(caught.value, TeacherUnavailableError)
    assert len(teacher.requests_to("/v1/logprobs")) == 1
    assert still.pauses == []
    assert (client.counters.retries, client.counters.failures) == (0, 1)


@pytest.mark.parametrize("path", ["/v1/manifest", "/v1/tokenizer"])
async def test_requests_about_the_teacher_are_retried_but_not_counted(path):
    teacher, still = ScriptedTeacher(), StillClock()
    teacher.script(path, httpx.ConnectError("refused"), problem(503, "loading"))
    async with client_of(still, math=teacher) as client:
        await client.tokenizer()

    assert len(teacher.requests_to(path)) == 3
    assert client.counters.retries == 0


async def test_pauses_double_up_to_a_maximum():
    # 429, because a busy teacher does not open its circuit breaker.
    pauses = await pauses_of_one_call(*[problem(429, "full") for _ in range(9)])
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


async def test_a_random_number_shortens_a_pause_by_up_to_half():
    assert await pauses_of_one_call(problem(503, "loading"), random=0.5) == [0.25 * 0.75]


@pytest.mark.parametrize(
    ("header", "pause"),
    [
        ("7", 7.0),
        ("soon", 0.25),
        ("", 0.25),
        ("-3", 0.25),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0.25),
        ("0", 0.25),
    ],
)
async def test_retry_after_is_honoured_as_a_number_of_seconds_only(header, pause):
    failure = problem(503, "loading", **{"retry-after": header})
    assert await pauses_of_one_call(failure) == [pause]


async def test_a_retry_after_is_spread_over_a_quarter_more():
    failure = problem(503, "loading", **{"retry-after": "8"})
    assert await pauses_of_one_call(failure, random=0.5) == [9.0]


async def test_the_error_at_the_deadline_reports_the_last_failure():
    teacher, still = ScriptedTeacher(), StillClock()
    teacher.script("/v1/logprobs", httpx.ConnectError("refused"))
    teacher.script("/v1/logprobs", *[problem(503, "still loading") for _ in range(20)])
    async with client_of(still, 10, math=teacher) as client:
        with pytest.raises(
            TeacherUnavailableError, match=r"still loading .*6 attempts within 10 s"
        ) as caught:
            await client.score([SEQUENCE], top_k=1)

    assert caught.value.status == 503
    assert still.seconds < 10
    assert (client.counters.retries, client.counters.failures) == (5, 1)


async def test_an_unreachable_teacher_has_no_status():
    client = TeacherClient("code", ["http://code"], transport=network(), clock=StillClock().clock)
    async with client:
        with pytest.raises(TeacherUnavailableError, match="no host code") as caught:
            await client.handshake()

    assert caught.value.status is None


@pytest.mark.parametrize("seconds", ["3600", "9" * 400])  # the latter is infinite as a float
async def test_a_retry_after_beyond_the_deadline_ends_the_call_at_once(seconds):
    teacher, still = ScriptedTeacher(), StillClock()
    teacher.script("/v1/logprobs", problem(503, "draining", **{"retry-after": seconds}))
    async with client_of(still, math=teacher) as client:
        with pytest.raises(TeacherUnavailableError, match=r"draining .*1 attempts within 60 s"):
            await client.score([SEQUENCE], top_k=1)

    assert still.pauses == []


async def test_a_timeout_of_one_attempt_is_transient():
    still = StillClock()
    attempts = itertools.count()

    async def stuck_once(replica: Replica) -> httpx.Response:
        if next(attempts) == 0:
            await _forever()
        return httpx.Response(200)

    response = await _send(_one_replica(still), stuck_once, still.clock, timeout=0.01)

    assert response.status_code == 200
    assert still.pauses == [0.25]


@pytest.mark.parametrize(("timeout", "deadline", "failures"), [(60.0, 0.01, 0), (0.01, 0.01, 1)])
async def test_a_timeout_shortened_by_the_deadline_is_no_failure_of_the_replica(
    timeout, deadline, failures
):
    async def stuck(replica: Replica) -> httpx.Response:
        await _forever()
        raise AssertionError

    still = StillClock()
    replicas = _one_replica(still)
    with pytest.raises(TeacherUnavailableError):
        await _send(replicas, stuck, still.clock, timeout=timeout, deadline=deadline)
    assert replicas.fixed[0].breaker.failures == failures


async def test_a_bug_in_the_client_is_not_retried():
    async def broken(replica: Replica) -> httpx.Response:
        raise KeyError(replica.url)

    still = StillClock()
    replicas = _one_replica(still)
    with pytest.raises(KeyError):
        await _send(replicas, broken, still.clock)
    assert replicas.fixed[0].in_flight == 0


async def test_a_retry_goes_to_another_replica():
    first, second, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    first.script("/v1/logprobs", httpx.ConnectError("refused"))
    async with client_of(still, first=first, second=second) as client:
        await client.score([SEQUENCE], top_k=1)

    assert len(first.requests_to("/v1/logprobs")) == 1
    assert len(second.requests_to("/v1/logprobs")) == 1


async def test_a_replica_is_skipped_until_its_retry_after_expires():
    first, second, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    first.script("/v1/logprobs", problem(429, "full", **{"retry-after": "30"}))
    async with client_of(still, first=first, second=second) as client:
        for _ in range(3):
            await client.score([SEQUENCE], top_k=1)
        assert len(first.requests_to("/v1/logprobs")) == 1
        assert still.pauses == [0.25]

        still.seconds += 30
        await client.score([SEQUENCE], top_k=1)

    assert len(first.requests_to("/v1/logprobs")) == 2


async def test_with_a_retry_after_of_every_replica_a_call_waits_for_the_shortest():
    first, second, still = ScriptedTeacher(), ScriptedTeacher(), StillClock()
    first.script("/v1/logprobs", problem(429, "full", **{"retry-after": "30"}))
    second.script("/v1/logprobs", problem(429, "full", **{"retry-after": "9"}))
    async with client_of(still, first=first, second=second) as client:
        await client.score([SEQUENCE], top_k=1)

    assert still.pauses == [0.25, 9.0]
    assert len(second.requests_to("/v1/logprobs")) == 2


def _one_replica(still: StillClock) -> Replicas:
    return Replicas("math", ["http://math"], clock=still.clock, counters=Counters())


async def _send(
    replicas: Replicas, send, clock: Clock, *, timeout: float = 60.0, deadline: float = 60.0
) -> httpx.Response:
    return await send_with_retries(
        replicas,
        send,
        attempts=Attempts("math", timeout, clock, Counters()),
        deadline_seconds=deadline,
    )


async def _forever() -> None:
    await asyncio.Event().wait()


async def test_an_invalid_certificate_is_not_retried():
    teacher, still = ScriptedTeacher(), StillClock()
    rejected = ssl.SSLCertVerificationError("certificate verify failed")
    rejected.verify_message = "self-signed certificate"
    error = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED]")
    error.__cause__ = OSError()
    error.__cause__.__context__ = rejected
    teacher.script("/v1/manifest", error)
    async with client_of(still, math=teacher) as client:
        with pytest.raises(TeacherError, match="self-signed") as caught:
            await client.handshake()
    assert (type(caught.value), caught.value.key) == (TeacherError, "certificate")
    assert still.pauses == []
