"""Student ranks as processes of this machine, joined over gloo."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from mopd_protocol.errors import MopdError
from mopd_trainer.config.run import StudentConfig
from mopd_trainer.distributed.process_group import Ranks, init_distributed
from mopd_trainer.launch.follower import follow
from tests.ports import free_port
from tests.processes import FORKS
from tests.tiers import require_process_mark

#: No test waits longer for a rank; it is killed then.
_SECONDS = 800.0


def on_ranks(
    size: int, work: Callable[..., None], *arguments: Any
) -> tuple[list[int | None], list[str]]:
    """Calls ``work(ranks, *arguments)`` in as many processes; exit codes, and what was told.

    The code is None for one that had to be killed, because it did not end.
    """
    require_process_mark()
    port, told = free_port(), FORKS.Queue()
    processes = [
        FORKS.Process(target=_one_rank, args=(rank, size, port, told, work, arguments))
        for rank in range(size)
    ]
    codes: list[int | None] = []
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(_SECONDS)
            codes.append(process.exitcode)
    finally:
        for process in processes:
            process.kill()
    sentences = [told.get() for code in codes if code == 2]
    return codes, [sentence for _, sentence in sorted(sentences)]


def led(ranks: Ranks, config: StudentConfig, work: Callable[[], None]) -> None:
    """Rank 0 works, the others follow it until it is done."""
    if ranks.rank:
        follow(config, ranks)
    else:
        work()
        ranks.lead("end")


def _one_rank(
    rank: int, size: int, port: int, told: Any, work: Any, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        with init_distributed("cpu") as ranks:
            work(ranks, *arguments)
            if ranks.rank:
                ranks.follow({})  # the last word
    except MopdError as error:
        told.put((rank, str(error)))
        sys.exit(2)
