"""``end_engine_with``: end vLLM's engine when the process that started it has ended.

Otherwise the engine would continue for ever, and keep its memory, when that process is killed.
"""

import os
import select
import signal
import threading
from contextlib import suppress
from pathlib import Path


def end_engine_with(starter: int) -> bool:
    """End the engine of this vLLM worker when the process ``starter`` has ended.

    The engine's workers end with the engine. Ctrl-C reaches every process and must not end a
    worker: the process that started vLLM finishes pending work, then ends vLLM. Returns False if
    ``starter`` cannot be watched. An actor of Ray is no descendant: Ray ends it, its parent is of
    all of Ray, and on another machine the id is that of another process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own_pid, parent = os.getpid(), os.getppid()
    # A single worker runs in the engine's process; several run in child processes of the engine.
    engine = own_pid if parent == starter else parent
    try:
        if engine == parent and _parent_of(parent) != starter:
            return False
        watched = os.pidfd_open(starter)
    except (AttributeError, OSError):  # not on Linux
        return False

    def wait() -> None:
        select.select([watched], [], [])
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-starter", daemon=True).start()
    return True


def _parent_of(process: int) -> int:
    """Return the id of a process's parent; raises OSError where there is no ``/proc``."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("\nPPid:")[2].split(maxsplit=1)[0])
