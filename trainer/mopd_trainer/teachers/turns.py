"""``TeacherTurns``: requests grouped by teacher where a service swaps teachers.

A service with several models (``--models``) loads a teacher's weights when it needs them. While a
step is sampled, its last teacher scores in the meantime; the requests to the others are sent after
the last completion, one teacher after another: a step costs at most one swap per teacher.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

#: Path of the teachers of such a service.
_PREFIX = "/teachers/"


@dataclass
class _Service:
    """A service that swaps teachers."""

    current: str | None = None
    """The teacher whose requests were sent last."""
    running: int = 0
    """Requests in progress, all of this teacher."""
    waiting: dict[str, list[asyncio.Future[None]]] = field(
        default_factory=dict[str, list[asyncio.Future[None]]]
    )

    async def enter(self, teacher: str) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self.waiting.setdefault(teacher, []).append(turn)
        loop.call_soon(self.advance)  # after the tasks that wait for the same event
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave()  # its turn had come
            raise

    def leave(self) -> None:
        self.running -= 1
        self.advance()

    def advance(self) -> None:
        """Send what waits for the first teacher, if no other one has a request in progress."""
        while self.waiting:
            first = next(iter(self.waiting))
            if self.running and first != self.current:
                return
            self.current = first
            turns = [turn for turn in self.waiting.pop(first) if not turn.done()]
            self.running += len(turns)
            for turn in turns:
                turn.set_result(None)


class TeacherTurns:
    """Order of the requests to teachers of the same services; others are not affected.

    Args:
        urls: teacher name -> addresses.
    """

    def __init__(self, urls: Mapping[str, Sequence[str]]) -> None:
        services: defaultdict[frozenset[str], _Service] = defaultdict(_Service)
        self._services = {
            name: services[frozenset(each.rpartition(_PREFIX)[0] for each in addresses)]
            for name, addresses in urls.items()
            if all(_PREFIX in each for each in addresses)
        }

    async def sampled(self, teacher: str, sampled: asyncio.Event) -> None:
        """Wait until the step is sampled, unless the teacher was used last."""
        service = self._services.get(teacher)
        if service is None:
            return
        service.current = service.current or teacher
        if service.current != teacher:
            await sampled.wait()

    @asynccontextmanager
    async def turn(self, teacher: str) -> AsyncGenerator[None]:
        """Surround a request: wait for those of other teachers that were earlier."""
        service = self._services.get(teacher)
        if service is None:
            yield
            return
        await service.enter(teacher)
        try:
            yield
        finally:
            service.leave()
