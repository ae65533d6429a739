"""``StudentRank``: a rank of the student in a Ray actor."""

# pyright: reportMissingImports=false

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.util import get_node_ip_address
from rich.console import Console

from mopd_protocol.errors import MopdError, message_of
from mopd_trainer.config.run import RunConfig
from mopd_trainer.launch.services import free_port
from mopd_trainer.launch.workers import RayWorkers


@dataclass(frozen=True)
class RankResult:
    """Outcome of a student rank."""

    folder: Path | None = None  # of the trained student
    error: str | None = None  # message; empty if another rank reports the error


class StudentRank:
    """One rank of the student, in a separate process."""

    def __repr__(self) -> str:
        return "mopd"

    def address(self) -> tuple[str, int]:
        """Return this node's host and a free port, for the rendezvous of the ranks."""
        return get_node_ip_address(), free_port()

    def process_id(self) -> int:
        """Return the process id."""
        return os.getpid()

    def train(
        self,
        config: RunConfig,
        rank: int,
        size: int,
        address: tuple[str, int],
        workers: Sequence[Any],
    ) -> RankResult:
        """Run the training loop of this rank."""
        from mopd_trainer.distributed.process_group import init_distributed
        from mopd_trainer.loop import train

        # Ray makes only the rank's own device visible.
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
        try:
            with init_distributed(config.student.device) as ranks:
                ray_workers = RayWorkers(workers, config) if workers else None
                training = train(config, Console(width=160), ranks=ranks, workers=ray_workers)
                return RankResult(asyncio.run(training))
        except (MopdError, BaseExceptionGroup) as error:
            message = message_of(error)
            if message is None:
                raise
            return RankResult(error=message)
        except SystemExit:
            return RankResult(error="")
