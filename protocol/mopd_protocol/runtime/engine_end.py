"""``end_engine_with``: vLLM's engine ends when the process that started it has ended.

By itself it would go on for ever, and keep its memory, when that process is killed.
"""

import os
import select
import signal
import threading
from contextlib import suppress


def end_engine_with(starter: int) -> bool:
    """Called in a worker of vLLM: ends its engine when the process ``starter`` has ended, and not
    before.

    The engine's workers end with it. Ctrl-C reaches every process and must not end a worker: who
    started vLLM finishes what is under way, then ends it. Returns False where ``starter`` cannot be
    watched.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    here, parent = os.getpid(), os.getppid()
    # A lone worker lives in the engine's process; several have processes of their own below it.
    engine = here if parent == starter else parent
    try:
        watched = os.pidfd_open(starter)
    except (AttributeError, OSError):  # not on Linux, or on another machine
        return False

    def wait() -> None:
        select.select([watched], [], [])
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-starter", daemon=True).start()
    return True
