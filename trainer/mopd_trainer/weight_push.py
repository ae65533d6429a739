"""``WeightPush``: the ways to bring a student's weights into a generation engine's workers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from mopd_trainer.student import Student

#: Calls a method of every worker by its name, with keyword arguments that can be sent to them.
CallWorkers = Callable[[str, Mapping[str, object]], Awaitable[object]]


class WeightPush(Protocol):
    """One way, from the student's memory to the workers'."""

    async def push(self, student: Student, call: CallWorkers) -> None:
        """Returns when every worker has the weights of now."""
        ...


class PushThroughFolder:
    """Writes the weights into a folder, which every worker reads: works on any device.

    Args:
        folder: where; None: the system's temporary folder. Both sides must see it, and one in
            memory is fastest. It holds the weights for as long as a push takes.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    async def push(self, student: Student, call: CallWorkers) -> None:
        """See ``WeightPush``."""
        with TemporaryDirectory(prefix="mopd-weights-", dir=self._folder) as written:
            await asyncio.to_thread(student.save_weights, Path(written))
            await call("reload_weights", {"weights_path": written})
