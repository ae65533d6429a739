"""``Interruption``: graceful shutdown on SIGINT, SIGTERM and SIGHUP."""

import asyncio
import signal
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """A signal cancelled the current work before it changed any weight."""


class Interrupted(Exception):
    """A signal ended the run; a checkpoint contains its last step."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """129 for SIGHUP, 130 for SIGINT, 143 for SIGTERM, as in shells."""


class Interruption:
    """Handle the first signal within the block; a second one has its default effect.

    A closed terminal sends SIGHUP, often twice: after the first one SIGHUP is ignored. A SIGHUP
    ignored from the start, as under ``nohup``, stays ignored. Outside the main thread no handler is
    installed.

    Args:
        ignored: ignore all signals, on non-zero ranks: rank 0 stops the run.
    """

    def __init__(self, *, ignored: bool = False) -> None:
        self._ignored = ignored
        self._requested = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._signal = signal.SIGINT
        self._handled: list[signal.Signals] = []

    async def cancel_on_signal(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``; cancel it when a signal arrives.

        Raises:
            Stopped: after a signal, also one before this call.
        """
        if self._requested.is_set():
            work.close()
            raise Stopped
        task = asyncio.create_task(work)
        requested = asyncio.create_task(self._requested.wait())
        try:
            await asyncio.wait((task, requested), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            for unfinished in (task, requested):
                unfinished.cancel()
            await asyncio.gather(task, requested, return_exceptions=True)
        raise Stopped

    def error(self, *, step: int, checkpoint: str) -> Interrupted:
        """Return the error that ends the run after ``step`` steps."""
        return Interrupted(
            f"{self._signal.name} after step {step}; {checkpoint}; resume with "
            "resume_from_checkpoint=true",
            exit_code=128 + self._signal,
        )

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        if self._ignored:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            return self
        hangup_ignored = signal.getsignal(signal.SIGHUP) != signal.SIG_DFL
        self._handled = [n for n in SIGNALS if n != signal.SIGHUP or not hangup_ignored]
        for number in self._handled:
            self._loop.add_signal_handler(number, self._request, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove_handlers()
        if signal.SIGHUP in self._handled:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def _request(self, number: signal.Signals) -> None:
        self._signal = number
        self._requested.set()
        self._remove_handlers()
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)

    def _remove_handlers(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in self._handled:
                self._loop.remove_signal_handler(number)
