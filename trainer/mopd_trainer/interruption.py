"""``Interruption``: Ctrl-C, SIGTERM and SIGHUP as a wish to stop where nothing is lost."""

import asyncio
import signal
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

#: What is a wish to stop; ranks that follow leave all of it to the first.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """A step was abandoned, before it changed anything, because a signal came."""


class Interrupted(Exception):
    """A run was ended by a signal; what it had learnt is in a checkpoint."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """129 for SIGHUP, 130 for SIGINT, 143 for SIGTERM, as shells have it."""


class Interruption:
    """Within its block, the first signal is remembered; a second one acts as it would have.

    A terminal that goes away sends SIGHUP, often twice: once it came, more of them do nothing. It
    is left alone where it is ignored, as under ``nohup``. Outside the main thread, all signals are
    left as they are.
    """

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._signal = signal.SIGINT
        self._heard: list[signal.Signals] = []

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns, or raises; it is cancelled when a signal comes first.

        Raises:
            Stopped: when a signal came.
        """
        if self._asked.is_set():
            work.close()
            raise Stopped
        task, asked = asyncio.create_task(work), asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            for unfinished in (task, asked):
                unfinished.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)
        raise Stopped

    def told(self, *, step: int, checkpoint: str) -> Interrupted:
        """What the run ends with after ``step`` steps."""
        return Interrupted(
            f"{self._signal.name} after step {step}; {checkpoint}; go on with "
            "resume_from_checkpoint=true",
            exit_code=128 + self._signal,
        )

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            left = signal.getsignal(signal.SIGHUP) != signal.SIG_DFL
            self._heard = [one for one in SIGNALS if one != signal.SIGHUP or not left]
            for one in self._heard:
                self._loop.add_signal_handler(one, self._ask, one)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._let_go()
        if signal.SIGHUP in self._heard:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def _ask(self, one: signal.Signals) -> None:
        self._signal = one
        self._asked.set()
        self._let_go()
        if one == signal.SIGHUP:
            signal.signal(one, signal.SIG_IGN)

    def _let_go(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for one in self._heard:
                self._loop.remove_signal_handler(one)
