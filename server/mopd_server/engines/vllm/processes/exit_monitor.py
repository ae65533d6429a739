"""Detection of the exit of vLLM's processes, and the message with its cause."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

#: Seconds between vLLM's report that its engine has crashed and the exit of the process.
_EXIT_GRACE_SECONDS = 10.0

#: Seconds to wait for the exit code of an exited process, and between two attempts.
_EXIT_CODE_SECONDS = 5.0
_EXIT_CODE_PAUSE_SECONDS = 0.01

_SEE_LOG = "; see its log"
_UNKNOWN_CAUSE = f"the vLLM engine has crashed{_SEE_LOG}"


class ExitMonitor:
    """Waits in a thread for the first exit among some processes.

    ``first_error`` returns the error that they have printed, if any.
    """

    def __init__(self, first_error: Callable[[], str | None] = lambda: None) -> None:
        self._cause: Future[str] = Future()
        self._first_error = first_error
        self._closed = False

    def start(self, processes: Sequence[BaseProcess]) -> None:
        """Monitor ``processes``; without any (with Ray, they run on other machines), do nothing."""
        if processes:
            arguments = (processes,)
            threading.Thread(
                target=self._wait, args=arguments, name="vllm-watch", daemon=True
            ).start()

    def add_callback(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the cause of an exit, once, from any thread."""
        self._cause.add_done_callback(lambda cause: callback(cause.result()))

    async def cause(self) -> str:
        """Return the cause as soon as the process has exited, or a general one after 10 s."""
        cause = asyncio.shield(asyncio.wrap_future(self._cause))
        try:
            return await asyncio.wait_for(cause, _EXIT_GRACE_SECONDS)
        except TimeoutError:
            self._report(_UNKNOWN_CAUSE)
            return _UNKNOWN_CAUSE

    def close(self) -> None:
        """Ignore all later exits."""
        self._closed = True

    def _wait(self, processes: Sequence[BaseProcess]) -> None:
        sentinels = wait([process.sentinel for process in processes])
        message = exit_message([each for each in processes if each.sentinel in sentinels])
        error = self._first_error()
        self._report(f"{message.removesuffix(_SEE_LOG)}: {error}" if error else message)

    def _report(self, cause: str) -> None:
        if not self._closed:
            with suppress(InvalidStateError):  # the first cause counts
                self._cause.set_result(cause)


def exit_message(exited: Sequence[BaseProcess]) -> str:
    """Return a message with the name and exit code, or signal, of the first exited process."""
    for process in exited:
        code = _exit_code(process)
        if code is not None and code < 0:
            return f"the vLLM process {process.name} was killed by {signal.Signals(-code).name}"
        if code is not None:
            return f"the vLLM process {process.name} exited with status {code}{_SEE_LOG}"
    return f"a vLLM process exited{_SEE_LOG}"


def _exit_code(exited: BaseProcess) -> int | None:
    """Poll for the exit code: if vLLM's own thread waits for the process first, the code is
    unknown in this thread until the other one has stored it."""
    for _ in range(round(_EXIT_CODE_SECONDS / _EXIT_CODE_PAUSE_SECONDS)):
        if (code := exited.exitcode) is not None:
            return code
        time.sleep(_EXIT_CODE_PAUSE_SECONDS)
    return None
