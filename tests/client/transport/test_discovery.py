"""Replicas behind a name come and go; each is used only if it is the teacher's."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from mopd_client.services.expectation import Expectation
from mopd_client.teacher_client import TeacherClient
from mopd_client.transport.discovery import RENEW_FAILED_SECONDS, RENEW_SECONDS
from mopd_protocol.errors import (
    DataError,
    TeacherError,
    TeacherMismatchError,
    TeacherUnavailableError,
)
from mopd_protocol.requests import SequenceRequest
from tests.client.scripted_teacher import ScriptedTeacher, manifest, network, problem
from tests.client.still_clock import StillClock, settle

pytestmark = pytest.mark.anyio

NAME = "dns+http://math:8101"


class Names:
    """A name server with one name."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] | OSError = addresses
        self.lookups: list[tuple[str, int]] = []

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return the current addresses."""
        self.lookups.append((host, port))
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses


def sequence(number: int = 0) -> SequenceRequest:
    """A sequence with another prompt for each number."""
    return SequenceRequest(prompt_token_ids=[number] * 40, completion_token_ids=[70, 71])


class OtherTasks(StillClock):
    """A clock whose sleep lets other tasks run, as that of the event loop."""

    async def _sleep(self, seconds: float) -> None:
        await super()._sleep(seconds)
        await settle()


class Cluster:
    """Scripted teachers at 10.0.0.1, 10.0.0.2, …, and a client of their name."""

    def __init__(self, count: int, **options: Any) -> None:
        self.teachers = {f"10.0.0.{number + 1}": ScriptedTeacher() for number in range(count)}
        self.names = Names(*self.teachers)
        self.still = OtherTasks()
        self.client = TeacherClient(
            "math",
            [NAME],
            transport=network(**self.teachers),
            clock=self.still.clock,
            resolve=self.names.resolve,
            **{"verify": 0, "deadline_seconds": 60.0, **options},
        )

    def __getitem__(self, number: int) -> ScriptedTeacher:
        return self.teachers[f"10.0.0.{number}"]

    async def score(self, count: int = 8, first: int = 0) -> None:
        """Score sequences of different prompts, one after another."""
        for number in range(first, first + count):
            [score] = await self.client.score([sequence(number)], top_k=1)
            assert score.token_ids.tolist() == [70, 71]

    def requests(self) -> list[int]:
        """Return the scoring requests of each teacher so far, and reset them."""
        counts = [len(each.requests_to("/v1/logprobs")) for each in self.teachers.values()]
        for each in self.teachers.values():
            each.requests.clear()
        return counts

    async def renewal(self, seconds: float = RENEW_SECONDS) -> None:
        """Advance the clock, and score until the addresses are resolved again."""
        self.still.seconds += seconds
        await self.score(1, first=1000)
        await settle()
        self.requests()


async def test_each_address_is_a_replica() -> None:
    cluster = Cluster(4)
    async with cluster.client as client:
        await client.wait_until_ready(5.0)
        await client.handshake()
        assert [each.url for each in client.replicas] == [
            f"http://{ip}:8101" for ip in cluster.teachers
        ]
    assert set(cluster.names.lookups) == {("math", 8101)}


async def test_requests_have_the_name_of_the_service() -> None:
    cluster = Cluster(2)
    async with cluster.client as client:
        await client.tokenizer()
        await cluster.score()
    for teacher in cluster.teachers.values():
        assert {request.headers["host"] for request in teacher.requests} == {"math:8101"}
    assert cluster.requests() == [4, 4]


async def test_counters_by_replica() -> None:
    cluster = Cluster(2)
    cluster[1].script("/v1/logprobs", problem(503, "loading"))
    async with cluster.client as client:
        await cluster.score(4)
        counts = {url: vars(each) for url, each in client.counters.pop().replicas.items()}
        assert client.counters.replicas == {}
    assert counts == {
        "http://10.0.0.1:8101": {"requests": 3, "tokens": 84, "failures": 1},
        "http://10.0.0.2:8101": {"requests": 2, "tokens": 84, "failures": 0},
    }


@pytest.mark.parametrize("early", [0.0, 0.5])
async def test_addresses_are_resolved_again(early: float) -> None:
    cluster = Cluster(3)
    cluster.names.addresses = ["10.0.0.1", "10.0.0.2"]
    async with cluster.client:
        await cluster.score(4)
        cluster.names.addresses = ["10.0.0.2", "10.0.0.3"]
        await cluster.renewal(RENEW_SECONDS - early)
        await cluster.score(8, first=100)
    first, _, last = cluster.requests()
    assert (first > 0, last > 0) == ((True, False) if early else (False, True))


@pytest.mark.parametrize("early", [0.0, 0.5])
async def test_addresses_are_resolved_again_after_a_failure(early: float) -> None:
    cluster = Cluster(2)
    cluster.names.addresses = ["10.0.0.1"]
    async with cluster.client as client:
        await cluster.score(1)
        cluster.names.addresses = ["10.0.0.2"]
        cluster[1].script("/v1/logprobs", *[httpx.ConnectError("refused")] * 99)
        cluster.still.seconds += RENEW_FAILED_SECONDS - early
        await cluster.score(1)
        # At 0, 0.25, 0.75 and 1.75 s; addresses are resolved while the next attempt is sent.
        assert client.counters.retries == (3 if early else 1)


async def test_a_replica_of_another_model_is_rejected_and_compared_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster(3)
    cluster[3].manifest = manifest(revision="r2")
    async with cluster.client as client:
        await cluster.score()
        assert cluster.requests()[2] == 0
        for _ in range(3):
            await cluster.renewal()
        assert client.counters.rejected_replicas == 1
        assert sum("http://10.0.0.3:8101" in each for each in caplog.messages) == 1
        cluster[3].manifest = manifest()
        await cluster.renewal()
        await cluster.score(9, first=100)
        assert cluster.requests()[2] in (3, 4)


async def test_a_new_replica_of_another_model_is_rejected() -> None:
    cluster = Cluster(2)
    cluster.names.addresses = ["10.0.0.1"]
    cluster[2].manifest = manifest(revision="r2")
    async with cluster.client as client:
        await cluster.score(1)
        cluster.names.addresses = [*cluster.teachers]
        await cluster.renewal()
        await cluster.score(4, first=100)
        assert cluster.requests() == [4, 0]
        assert client.counters.rejected_replicas == 1


@pytest.mark.parametrize("lower", [{"max_top_k": 63}, {"max_model_len": 255}, {"max_top_k": 65}])
async def test_a_new_replica_with_lower_limits_is_rejected(lower: dict[str, int]) -> None:
    cluster = Cluster(2)
    cluster.names.addresses = ["10.0.0.1"]
    cluster[2].manifest = manifest(**lower)
    async with cluster.client as client:
        await cluster.score(1)
        cluster.names.addresses = [*cluster.teachers]
        await cluster.renewal()
        assert len(client.replicas) == (2 if lower == {"max_top_k": 65} else 1)


async def test_a_replica_that_is_replaced_by_another_model_loses_no_request() -> None:
    cluster = Cluster(2)
    async with cluster.client as client:
        await cluster.score(2)
        cluster[1].manifest = manifest(revision="r2")
        cluster.requests()
        await cluster.score(4, first=100)
        assert client.counters.rejected_replicas == 1
        assert cluster.requests() == [1, 4]
        assert [each.url for each in client.replicas] == ["http://10.0.0.2:8101"]


async def test_a_teacher_whose_replicas_are_all_replaced_raises() -> None:
    cluster = Cluster(2)
    async with cluster.client:
        await cluster.score(2)
        for each in cluster.teachers.values():
            each.manifest = manifest(revision="r2")
        with pytest.raises(DataError) as caught:
            await cluster.score(1)
    assert caught.value.key == "manifest_id"


@pytest.mark.parametrize("expected", [None, "r2"])
async def test_the_handshake_uses_the_expected_or_the_most_common_manifest(
    expected: str | None,
) -> None:
    cluster = Cluster(3)
    cluster[1].manifest = other = manifest(revision="r2")
    expectation = Expectation(manifest_id=other.manifest_id) if expected else None
    async with cluster.client as client:
        assert (await client.handshake(expectation)).revision == (expected or "r1")
        await cluster.score(6)
    assert cluster.requests() == ([6, 0, 0] if expected else [0, 3, 3])


async def test_an_unreachable_or_unauthorized_replica_is_not_used() -> None:
    cluster = Cluster(3)
    cluster[1].script("/v1/manifest", *[httpx.ConnectError("refused")] * 99)
    cluster[2].script("/v1/manifest", *[problem(401, "no key")] * 99)
    async with cluster.client as client:
        await client.handshake()
        await cluster.score(3)
        assert cluster.requests() == [0, 0, 3]
        for number in (1, 2):
            cluster[number].scripts.clear()
        await cluster.renewal()
        assert len(client.replicas) == 3


async def test_replicas_that_are_all_unauthorized_raise() -> None:
    cluster = Cluster(2)
    for each in cluster.teachers.values():
        each.script("/v1/manifest", *[problem(401, "no key")] * 99)
    async with cluster.client as client:
        with pytest.raises(TeacherError) as caught:
            await client.handshake()
    assert caught.value.status == 401


@pytest.mark.parametrize("call", ["wait_until_ready", "handshake", "score"])
async def test_a_name_without_an_address_raises_at_the_deadline(call: str) -> None:
    cluster = Cluster(1, deadline_seconds=5.0)
    cluster.names.addresses = OSError("Name or service not known")
    async with cluster.client as client:
        calls = {
            "wait_until_ready": lambda: client.wait_until_ready(5.0),
            "handshake": client.handshake,
            "score": lambda: client.score([sequence()], top_k=1),
        }
        with pytest.raises(TeacherUnavailableError) as caught:
            await calls[call]()
        assert NAME in str(caught.value)
        assert 3 < cluster.still.seconds <= 5
        cluster.names.addresses = ["10.0.0.1"]
        await cluster.score(1)


async def test_a_teacher_that_starts_at_another_address_becomes_ready() -> None:
    cluster = Cluster(2)

    async def resolve_late(host: str, port: int) -> Sequence[str]:
        return ["10.0.0.9"] if cluster.still.seconds < 20 else ["10.0.0.2"]

    cluster.client = TeacherClient(
        "math",
        [NAME],
        transport=network(**cluster.teachers),
        clock=cluster.still.clock,
        resolve=resolve_late,
    )
    async with cluster.client as client:
        await client.wait_until_ready(60.0)
    assert len(cluster[2].requests_to("/readyz")) == 1


async def test_replicas_that_are_all_unreachable_are_reported() -> None:
    cluster = Cluster(2)
    cluster.names.addresses = ["10.0.0.1"]
    async with cluster.client as client:
        await client.handshake()
        cluster.names.addresses = ["10.0.0.2"]
        cluster[2].script("/v1/manifest", *[httpx.ConnectError("refused")] * 999)
        await cluster.renewal()
        with pytest.raises(TeacherUnavailableError, match=r"10\.0\.0\.2.*refused"):
            await cluster.score(1)


async def test_replicas_are_kept_while_the_name_server_fails() -> None:
    cluster = Cluster(2)
    async with cluster.client as client:
        await cluster.score(2)
        cluster.names.addresses = OSError("Temporary failure in name resolution")
        for _ in range(3):
            await cluster.renewal()
        assert len(client.replicas) == 2
        assert len(cluster.names.lookups) == 4


async def test_a_request_waits_for_a_replica() -> None:
    cluster = Cluster(1)
    async with cluster.client as client:
        await client.handshake()
        cluster.names.addresses = []
        await client._connection.replicas.renew()  # pyright: ignore[reportPrivateUsage]
        assert client.replicas == ()
        call = asyncio.create_task(client.score([sequence()], top_k=1))
        while cluster.still.seconds < 5:
            await asyncio.sleep(0)
        cluster.names.addresses = ["10.0.0.1"]
        assert len(await call) == 1


async def test_a_retry_does_not_wait_longer_than_until_addresses_are_resolved() -> None:
    """The only replica has a long Retry-After when another one comes."""
    cluster = Cluster(2, deadline_seconds=1000.0)
    cluster.names.addresses = ["10.0.0.1"]
    async with cluster.client as client:
        await client.handshake()
        [only] = client.replicas
        only.not_before = 500.0
        cluster.names.addresses = [*cluster.teachers]
        await cluster.score(1)
    assert cluster.still.seconds <= 2 * RENEW_SECONDS


async def test_fixed_addresses_and_a_name_are_replicas_together() -> None:
    cluster = Cluster(3)
    cluster.names.addresses = ["10.0.0.2", "10.0.0.3"]
    client = TeacherClient(
        "math",
        ["http://10.0.0.1:8101", NAME],
        transport=network(**cluster.teachers),
        clock=cluster.still.clock,
        resolve=cluster.names.resolve,
        verify=0,
    )
    cluster.client = client
    cluster[2].manifest = manifest(revision="r2")
    async with client:
        await cluster.score(4)
        assert cluster.requests() == [2, 0, 2]
        cluster[1].manifest = manifest(revision="r3")
        with pytest.raises(DataError):
            await cluster.score(4, first=100)


async def test_an_unreachable_fixed_replica_is_skipped_unless_all_are_required(
    caplog: pytest.LogCaptureFixture,
) -> None:
    urls = ["http://one:1", "http://two:1"]
    for required in (False, True):
        client = TeacherClient(
            "math",
            urls,
            transport=network(one=ScriptedTeacher()),
            clock=StillClock().clock,
            deadline_seconds=20.0,
            **({"require_all_replicas": True} if required else {}),
        )
        async with client:
            if required:
                with pytest.raises(TeacherUnavailableError):
                    await client.handshake()
            else:
                await client.handshake()
                assert "http://two:1" in caplog.text


async def test_fixed_replicas_of_two_models_raise() -> None:
    teachers = {"one": ScriptedTeacher(), "two": ScriptedTeacher(manifest(revision="r2"))}
    client = TeacherClient("math", ["http://one", "http://two"], transport=network(**teachers))
    async with client:
        with pytest.raises(TeacherMismatchError) as caught:
            await client.handshake()
    assert caught.value.key == "manifest_id"
