"""``BackgroundLoop``: an event loop on a thread, for synchronous callers."""

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """An event loop on a background thread; a running loop (a notebook's) does not interfere.

    The loop ends with ``close`` or when the object is garbage-collected.

    Args:
        name: name of the thread.
        aclose: awaited before the loop ends.
    """

    def __init__(self, name: str, aclose: Callable[[], Awaitable[None]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run_loop, args=(self._loop, aclose), name=name, daemon=True
        )
        self._thread.start()
        self._stop = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of a call in the loop."""
        future = self.submit(call)
        try:
            return future.result()
        finally:
            future.cancel()  # after a KeyboardInterrupt; no effect on a finished call

    def submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a call in the loop, for callers in another loop."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        """Stop the loop and its thread; a second call has no effect."""
        self._stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop, aclose: Callable[[], Awaitable[None]]) -> None:
    """Serve the loop until stopped, then close what uses it, and the loop."""

    async def close() -> None:
        await aclose()

    try:
        loop.run_forever()
        loop.run_until_complete(close())
    finally:
        loop.close()
