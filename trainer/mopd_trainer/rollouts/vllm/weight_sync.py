"""``WeightPush``: how a student's weights reach the workers of a generation engine."""

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
    """Interface of an engine for a push; no request is in flight."""

    async def call_workers(self, method: str, options: Mapping[str, object]) -> object:
        """Call a method of every worker by name, with serializable arguments."""
        ...

    async def load_adapters(self, folder: Path) -> None:
        """Replace the adapters by those of a folder."""
        ...


class WeightPush(Protocol):
    """Transfer weights from the student to the workers."""

    async def push(self, student: Student, engine: WeightReceiver) -> None:
        """Return once every worker has loaded the student's current weights."""
        ...


class PushThroughFolder:
    """Save the weights to a folder that every worker loads; works on any device.

    Args:
        folder: shared by trainer and workers, fastest in memory; default: the system's temporary
            folder. Contains the weights during a push.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    async def push(self, student: Student, engine: WeightReceiver) -> None:
        """See ``WeightPush``."""
        async with _saved(student, self._folder) as saved:
            await engine.call_workers(
                RolloutWorkerExtension.load_weights_from_folder.__name__, {"folder": str(saved)}
            )


class PushAdapters:
    """Push only the adapters of a LoRA student (megabytes), through a folder.

    Args:
        folder: as in ``PushThroughFolder``.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    async def push(self, student: Student, engine: WeightReceiver) -> None:
        """See ``WeightPush``."""
        async with _saved(student, self._folder) as saved:
            await engine.load_adapters(saved)


def weight_push(student: StudentConfig, folder: Path | None) -> WeightPush:
    """Return the push for full weights or adapters, through a folder."""
    return PushThroughFolder(folder) if student.lora is None else PushAdapters(folder)


@asynccontextmanager
async def _saved(student: Student, folder: Path | None) -> AsyncGenerator[Path]:
    with TemporaryDirectory(prefix="mopd-weights-", dir=folder) as saved:
        await asyncio.to_thread(student.save_weights, Path(saved))
        yield Path(saved)
