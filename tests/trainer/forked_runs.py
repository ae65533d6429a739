"""``mopd`` in processes that can be killed anywhere: before a file access, or by an alarm."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import processes


@dataclass(frozen=True)
class Ended:
    """Exit status (negative: the signal), number of accesses to the folder, and output."""

    status: int
    touches: int
    output: str


@dataclass
class Accesses:
    """Counts the accesses to a folder (an open, a rename, a removal, by Python's audit events)."""

    folder: str
    counter: Path
    """Grows by a byte at every access."""
    signal_before: tuple[int, int] | None
    """The number of an access, and the signal that the process sends itself before it."""
    alarm_seconds: float
    """The time after which an alarm ends the process; 0 for never."""
    prepare: Callable[[], object] | None = None
    """Called in the process."""

    def __call__(self) -> None:
        """Install the audit hook and the alarm in this process."""
        if self.prepare is not None:
            self.prepare()
        self._count = 0
        self._descriptor = os.open(self.counter, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        sys.addaudithook(self._audit)
        signal.setitimer(signal.ITIMER_REAL, self.alarm_seconds)

    def _audit(self, event: str, details: tuple[Any, ...]) -> None:
        paths = [str(part) for part in details if isinstance(part, str | Path)]
        if any(path.startswith(self.folder) for path in paths):
            self._count += 1
            os.write(self._descriptor, b".")
            if self.signal_before and self._count == self.signal_before[0]:
                os.kill(os.getpid(), self.signal_before[1])


def run_mopd(
    arguments: Sequence[str],
    *,
    folder: Path,
    kill_before: int | None = None,
    alarm_seconds: float = 0.0,
    signal_before: tuple[int, int] | None = None,
    prepare: Callable[[], object] | None = None,
) -> Ended:
    """Run ``mopd`` to its end.

    Args:
        folder: the run's folder, whose accesses are counted; its parent gets the log.
        kill_before: the number of the access before which the process kills itself.
        alarm_seconds: the time after which an alarm ends it; 0 for never.
        signal_before: the number of an access, and the signal that it sends itself then.
        prepare: called in the process before it starts; a function of a module.
    """
    if kill_before is not None:
        signal_before = (kill_before, signal.SIGKILL)
    counter, log = folder.parent / "accesses", folder.parent / "log"
    counter.unlink(missing_ok=True)
    program = processes.start(
        "mopd",
        *arguments,
        stdout=log.with_suffix(".stdout"),
        stderr=log,
        before=Accesses(str(folder), counter, signal_before, alarm_seconds, prepare),
    )
    try:
        status = program.wait()
    finally:
        program.kill()
    output = log.read_text() + log.with_suffix(".stdout").read_text()
    return Ended(status, counter.stat().st_size if counter.exists() else 0, output)
