"""``WeightPush``: the ways to bring a student's weights into a generation engine's workers."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from mopd_trainer.config.run import StudentConfig
from mopd_trainer.rollouts.vllm.worker_extension import RolloutWorkerExtension
from mopd_trainer.student.student import Student


class WeightReceiver(Protocol):
    """What an engine lets a push do. Nothing is in flight meanwhile."""

    async def call_workers(self, method: str, options: Mapping[str, object]) -> object:
        """Calls a method of every worker by its name, with arguments that can be sent to them."""
        ...

    async def take_adapters(self, folder: Path) -> None:
        """Writes with the adapters of a folder from now on, and with no earlier ones."""
        ...


class WeightPush(Protocol):
    """One way, from the student's memory to the workers'."""

    async def push(self, student: Student, engine: WeightReceiver) -> None:
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

    async def push(self, student: Student, engine: WeightReceiver) -> None:
        """See ``WeightPush``."""
        async with _written(student, self._folder) as written:
            await engine.call_workers(
                RolloutWorkerExtension.load_weights_from_folder.__name__, {"folder": str(written)}
            )


class PushAdapters:
    """The same with the adapters of a LoRA student: megabytes, beside weights that never change.

    Args:
        folder: as ``PushThroughFolder`` has it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    async def push(self, student: Student, engine: WeightReceiver) -> None:
        """See ``WeightPush``."""
        async with _written(student, self._folder) as written:
            await engine.take_adapters(written)


def weight_push(student: StudentConfig, folder: Path | None) -> WeightPush:
    """How what is trained of such a student is pushed, by way of a folder."""
    return PushThroughFolder(folder) if student.lora is None else PushAdapters(folder)


@asynccontextmanager
async def _written(student: Student, folder: Path | None) -> AsyncGenerator[Path]:
    with TemporaryDirectory(prefix="mopd-weights-", dir=folder) as written:
        await asyncio.to_thread(student.save_weights, Path(written))
        yield Path(written)
