"""``TeacherPool``: all teachers of a run, asked by name."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

from mopd_client.services.expectation import Expectation
from mopd_client.tokenizers.teacher import TeacherTokenizer
from mopd_client.transport.counters import Counters
from mopd_protocol.errors import ConfigError, MopdError, TeacherError
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsDtype, SequenceRequest
from mopd_protocol.samples import TeacherScore

T = TypeVar("T")


class AskedTeacher(Protocol):
    """A teacher, wherever it is: a ``TeacherClient`` asks a service."""

    @property
    def counters(self) -> Counters:
        """What asking it cost so far."""
        ...

    @property
    def path(self) -> str | None:
        """Where its servers are asked; None where there are none."""
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
    """Teachers by name, or none. Closing the pool closes them."""

    def __init__(self, clients: Mapping[str, AskedTeacher]) -> None:
        self._clients = dict(clients)

    def client(self, name: str) -> AskedTeacher:
        """One teacher.

        Raises:
            ConfigError: when no teacher has this name.
        """
        if name not in self._clients:
            raise ConfigError(
                f"unknown teacher {name!r}; known teachers are {', '.join(sorted(self._clients))}"
            )
        return self._clients[name]

    async def wait_until_ready(self, deadline_seconds: float) -> None:
        """Returns when every teacher is ready to score; each has the whole deadline.

        Raises:
            TeacherError: when one is not; several failures are told together.
        """
        await _all(client.wait_until_ready(deadline_seconds) for client in self._clients.values())

    async def handshake_all(
        self, expectations: Mapping[str, Expectation] | None = None
    ) -> dict[str, Manifest]:
        """Teacher name -> manifest; each teacher is compared with the expectation of its name.

        Raises:
            MopdError: as ``TeacherClient.handshake``; several failures are told together.
        """
        expected = expectations or {}
        for name in expected:
            self.client(name)
        manifests = await _all(
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
        """As ``TeacherClient.score`` of the named teacher."""
        return await self.client(teacher_name).score(
            sequences, top_k=top_k, temperature=temperature, logprobs_dtype=logprobs_dtype
        )

    async def aclose(self) -> None:
        """Closes every teacher's connections."""
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


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Every result; waits for all, so that an operator reads all refusals at once, not the first.

    Raises:
        MopdError: the one failure, or a TeacherError that tells them all.
    """
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    results: list[T] = []
    refusals: list[MopdError] = []
    for outcome in outcomes:
        if isinstance(outcome, MopdError):
            refusals.append(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome  # a bug, not a refusal
        else:
            results.append(outcome)
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        told = "".join(f"\n  {refusal}" for refusal in refusals)
        raise TeacherError(f"{len(refusals)} teachers cannot be used:{told}") from refusals[0]
    return results
