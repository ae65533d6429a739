"""``mopd`` in processes that can be killed anywhere, without the seconds that importing takes.

Run as a program, this imports what training needs and then forks once a request, a line of JSON on
stdin. A fork is a whole ``mopd`` process; it may kill itself before its nth touch of a folder (an
open, a rename, a removal, as Python's audit events tell them), or be ended by an alarm.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How a process ended: its status (negative: the signal), and after what."""

    status: int
    touches: int | None  # None where it was killed
    told: str


class Forks:
    """The program, from outside."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log

    def run(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        kill_before: int | None = None,
        alarm_seconds: float = 0.0,
        signal_before: tuple[int, int] | None = None,
    ) -> Ended:
        """A ``mopd`` process, from its beginning to its end.

        Args:
            kill_before: the number of the touch of ``folder`` before which it kills itself.
            alarm_seconds: of running, after which an alarm ends it; 0 for never.
            signal_before: the number of a touch, and the signal that it then sends itself.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        at, number = signal_before or (kill_before, signal.SIGKILL)
        request = [list(arguments), str(folder), at, int(number), alarm_seconds]
        before = self._log.stat().st_size
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status, touches = json.loads(self._process.stdout.readline())
        return Ended(status, touches, self._log.read_bytes()[before:].decode())


@contextmanager
def forks(log: Path) -> Iterator[Forks]:
    """The program; ``log`` gets what its processes say."""
    with (
        log.open("w") as told,
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.forked_runs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        ) as process,
    ):
        yield Forks(process, log)
        assert process.stdin is not None
        process.stdin.close()


def _serve() -> None:
    import torch.utils.tensorboard
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import mopd_trainer.loop  # noqa: F401

    torch.set_num_threads(1)
    answers = os.dup(1)
    os.dup2(2, 1)  # what the processes print goes to the log
    for line in sys.stdin:
        arguments, folder, at, number, alarm_seconds = json.loads(line)
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            os.close(reading)
            _be_mopd(arguments, folder, at, number, alarm_seconds, writing)
        os.close(writing)
        _, status = os.waitpid(process, 0)
        touches = os.read(reading, 100)
        os.close(reading)
        ended = [os.waitstatus_to_exitcode(status), json.loads(touches or b"null")]
        os.write(answers, json.dumps(ended).encode() + b"\n")


def _be_mopd(
    arguments: list[str],
    folder: str,
    at: int | None,
    number: int,
    alarm_seconds: float,
    answer: int,
) -> None:
    from mopd_trainer.cli.main import main

    touches = 0

    def count(event: str, details: tuple[Any, ...]) -> None:
        nonlocal touches
        if any(isinstance(one, str | Path) and str(one).startswith(folder) for one in details):
            touches += 1
            if touches == at:
                os.kill(os.getpid(), number)

    sys.addaudithook(count)
    signal.setitimer(signal.ITIMER_REAL, alarm_seconds)  # ends a process that does not handle it
    status = 1
    try:
        main(arguments)
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        os.write(answer, str(touches).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
