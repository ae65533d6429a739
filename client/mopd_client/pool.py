"""``TeacherPool``: all teachers of a run, by name."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

from mopd_client.services.expectation import Expectation
from mopd_client.transport.counters import Counters
from mopd_protocol.errors import ConfigError, MopdError, TeacherError
from mopd_protocol.manifest import Manifest
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_protocol.requests import LogprobsDtype, SequenceRequest
from mopd_protocol.samples import TeacherScore

T = TypeVar("T")


class ScoringClient(Protocol):
    """Interface of a teacher, remote (``TeacherClient``) or in-process."""

    @property
    def counters(self) -> Counters:
        """Cost of this teacher's requests so far."""
        ...

    @property
    def path(self) -> str | None:
        """Path of scoring requests; None for an in-process teacher."""
        ...

    async def wait_until_ready(self, deadline_seconds: float) -> None:
        """See ``TeacherClient``."""
        ...

    async def handshake(self, expectation: Expectation | None = None) -> Manifest:
        """See ``TeacherClient``."""
        ...

    async def tokenizer(self) -> TeacherTokenizer:
        """See ``TeacherClient``."""
        ...

    async def score(
        self,
        sequences: Sequence[SequenceRequest],
        *,
        top_k: int,
        temperature: float = 1.0,
        logprobs_dtype: LogprobsDtype = "float32",
    ) -> list[TeacherScore]:
        """See ``TeacherClient``."""
        ...

    async def aclose(self) -> None:
        """See ``TeacherClient``."""
        ...


class TeacherPool:
    """Teachers by name; may be empty. Closing the pool closes its teachers."""

    def __init__(self, clients: Mapping[str, ScoringClient]) -> None:
        self._clients = dict(clients)

    def client(self, name: str) -> ScoringClient:
        """Return the client of one teacher.

        Raises:
            ConfigError: if no teacher has this name.
        """
        if name not in self._clients:
            raise ConfigError(
                f"teacher {name!r} not found (expected one of {', '.join(sorted(self._clients))})",
                key="teacher",
            )
        return self._clients[name]

    async def wait_until_ready(self, deadline_seconds: float) -> None:
        """Wait until every teacher is ready to score; each has the full deadline.

        Raises:
            TeacherError: if a teacher is not ready; several failures are reported together.
        """
        await _gather(c.wait_until_ready(deadline_seconds) for c in self._clients.values())

    async def handshake_all(
        self, expectations: Mapping[str, Expectation] | None = None
    ) -> dict[str, Manifest]:
        """Return teacher name -> manifest, each checked against the expectation of its name.

        Raises:
            MopdError: as ``TeacherClient.handshake``; several failures are reported together.
        """
        expected = expectations or {}
        for name in expected:
            self.client(name)
        manifests = await _gather(
            client.handshake(expected.get(name)) for name, client in self._clients.items()
        )
        return dict(zip(self._clients, manifests, strict=True))

    async def score(
        self,
        teacher_name: str,
        sequences: Sequence[SequenceRequest],
        *,
        top_k: int,
        temperature: float = 1.0,
        logprobs_dtype: LogprobsDtype = "float32",
    ) -> list[TeacherScore]:
        """Score with the named teacher; see ``TeacherClient.score``."""
        return await self.client(teacher_name).score(
            sequences, top_k=top_k, temperature=temperature, logprobs_dtype=logprobs_dtype
        )

    async def aclose(self) -> None:
        """Close all teachers' connections."""
        await asyncio.gather(*[client.aclose() for client in self._clients.values()])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


async def _gather(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return every result; wait for all calls, so that all failures are reported at once.

    Raises:
        MopdError: the one failure, or a TeacherError with the messages of all.
    """
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    results: list[T] = []
    failures: list[MopdError] = []
    for outcome in outcomes:
        if isinstance(outcome, MopdError):
            failures.append(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome  # a bug
        else:
            results.append(outcome)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        messages = "".join(f"\n  {failure}" for failure in failures)
        raise TeacherError(f"{len(failures)} teachers failed:{messages}") from failures[0]
    return results
