"""``StderrTail``: the first error that vLLM's processes print, for the message of their exit.

vLLM reports the exit of its processes without the cause: "Failed core proc(s): {}".
"""

import os
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager

_STDERR = 2
#: Bytes to remember; the first error of a process is followed by its consequences.
_MAX_BYTES = 1024 * 1024
_READ_BYTES = 64 * 1024

#: The last line of a traceback, which vLLM's log prefixes with "... [file.py:123] ".
_ERROR = re.compile(
    rb"^(?:.*\] )?((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?:: .*)?)$", re.MULTILINE
)
_TRACEBACK = b"Traceback (most recent call last)"


class StderrTail:
    """Passes the standard error of child processes on, and remembers its end."""

    def __init__(self) -> None:
        self._tail = bytearray()
        self._ended = threading.Event()
        self._ended.set()

    @contextmanager
    def inherited(self) -> Generator[None]:
        """Give processes that are started in the block a standard error that is remembered."""
        read, write = os.pipe()
        original = os.dup(_STDERR)
        os.dup2(write, _STDERR)
        os.close(write)
        self._ended.clear()
        threading.Thread(
            target=self._copy, args=(read, original), name="stderr-tail", daemon=True
        ).start()
        try:
            yield
        finally:
            os.dup2(original, _STDERR)

    def first_error(self, wait_seconds: float = 0.0) -> str | None:
        """Return the last line of the first traceback; wait for the processes to end."""
        self._ended.wait(wait_seconds)
        start = self._tail.find(_TRACEBACK)
        match = _ERROR.search(self._tail, start) if start >= 0 else None
        return match[1].decode(errors="replace") if match else None

    def _copy(self, read: int, original: int) -> None:
        while part := os.read(read, _READ_BYTES):
            self._tail = (self._tail + part)[-_MAX_BYTES:]
            os.write(original, part)
        os.close(read)
        os.close(original)
        self._ended.set()
