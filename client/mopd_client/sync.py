"""``SyncTeacherClient``: a teacher for notebooks and scripts that have no ``await``."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from mopd_client.services.expectation import Expectation
from mopd_client.teacher_client import TeacherClient
from mopd_client.tokenizers.teacher import TeacherTokenizer
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsDtype, SequenceRequest
from mopd_protocol.samples import TeacherScore

T = TypeVar("T")


class SyncTeacherClient:
    """Runs a ``TeacherClient`` in an event loop of its own, and closes it.

    The loop has its own thread because a notebook's thread already runs one. Methods do and raise
    what the client's do.
    """

    def __init__(self, client: TeacherClient) -> None:
        self.client = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"teacher {client.name}", daemon=True
        )
        self._thread.start()

    def wait_until_ready(self, deadline_seconds: float) -> None:
        """Returns when every replica is ready to score."""
        self._run(self.client.wait_until_ready(deadline_seconds))

    def handshake(self, expectation: Expectation | None = None) -> Manifest:
        """Who this teacher is."""
        return self._run(self.client.handshake(expectation))

    def tokenizer(self) -> TeacherTokenizer:
        """The teacher's tokenizer."""
        return self._run(self.client.tokenizer())

    def score(
        self,
        sequences: Sequence[SequenceRequest],
        *,
        top_k: int,
        temperature: float = 1.0,
        logprobs_dtype: LogprobsDtype = "float32",
    ) -> list[TeacherScore]:
        """One score for each sequence, in their order."""
        return self._run(
            self.client.score(
                sequences, top_k=top_k, temperature=temperature, logprobs_dtype=logprobs_dtype
            )
        )

    def close(self) -> None:
        """Closes the client and ends the thread; a second call does nothing."""
        if self._loop.is_closed():
            return
        self._run(self.client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # after an interrupt; a finished call is left as it is
