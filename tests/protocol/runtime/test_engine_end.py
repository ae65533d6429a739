"""A worker ends its engine with the process that started it, and no other process."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.process

#: Each process starts the next: starter, engine, worker. The first two print their ids, the worker
#: whether it watches the process of the argument (0: the starter).
_STARTER = """
import os, subprocess, sys
print(os.getpid(), flush=True)
subprocess.run([sys.executable, "-c", {engine!r}, str(os.getpid()), sys.argv[1]])
"""
_ENGINE = """
import os, subprocess, sys
print(os.getpid(), flush=True)
subprocess.run([sys.executable, "-c", {worker!r}, *sys.argv[1:]])
"""
_WORKER = """
import sys
from mopd_protocol.runtime.engine_end import end_engine_with
print(end_engine_with(int(sys.argv[2]) or int(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def unrelated() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is no ancestor of the worker, like one of the same id on another machine."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process


@pytest.mark.parametrize("is_starter", [True, False])
def test_only_a_process_that_started_the_engine_is_watched(
    is_starter: bool, unrelated: subprocess.Popen[bytes]
) -> None:
    script = _STARTER.format(engine=_ENGINE.format(worker=_WORKER))
    watched = "0" if is_starter else str(unrelated.pid)
    command = [sys.executable, "-c", script, watched]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        lines = [starter.stdout.readline().strip() for _ in range(3)]
        engine = os.pidfd_open(int(lines[1]))
        assert lines[2] == str(is_starter)
        if is_starter:
            starter.send_signal(signal.SIGKILL)
            os.waitid(os.P_PID, starter.pid, os.WEXITED | os.WNOWAIT)
        else:
            unrelated.kill()
            unrelated.wait()
        ended, _, _ = select.select([engine], [], [], 60 if is_starter else 1)
        assert bool(ended) == is_starter
        starter.stdin.close()
