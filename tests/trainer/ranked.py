"""Student ranks as local processes in a gloo process group."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from mopd_protocol.errors import MopdError
from mopd_trainer.distributed.process_group import init_distributed
from tests.ports import free_port
from tests.processes import FORKS
from tests.tiers import require_process_mark

#: Timeout after which a rank is killed.
_SECONDS = 800.0


def on_ranks(
    size: int, work: Callable[..., None], *arguments: Any
) -> tuple[list[int | None], list[str]]:
    """Call ``work(ranks, *arguments)`` on every rank; return exit codes and error messages.

    The code is None for a rank that was killed after the timeout.
    """
    require_process_mark()
    port, messages = free_port(), FORKS.Queue()
    processes = [
        FORKS.Process(target=_one_rank, args=(rank, size, port, messages, work, arguments))
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
    errors = [messages.get() for code in codes if code == 2]
    return codes, [message for _, message in sorted(errors)]


def _one_rank(
    rank: int, size: int, port: int, messages: Any, work: Any, arguments: tuple[Any, ...]
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
    except MopdError as error:
        messages.put((rank, str(error)))
        sys.exit(2)
