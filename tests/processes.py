"""Python programs in processes forked from one that has imported torch and transformers already.

A fork starts in milliseconds, where a fresh interpreter needs seconds to import torch. It is a
separate process in every other respect: arguments, environment, folder, output and exit status.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.tiers import require_process_mark

ROOT = Path(__file__).parents[1]
#: Longer than any process here lives; reached only when something is broken.
PATIENCE_SECONDS = 800.0

#: For ``multiprocessing`` in tests: children of the process that has imported ``preloaded``.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])


@dataclass(frozen=True)
class Program:
    """A running program, with the methods of ``subprocess.Popen`` that tests call."""

    process: multiprocessing.process.BaseProcess
    stdout: Path
    stderr: Path

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        """The exit status; None while the program runs."""
        return self.process.exitcode

    def wait(self, timeout: float = PATIENCE_SECONDS) -> int:
        """The exit status, negative for a signal, once the program has ended.

        Raises:
            subprocess.TimeoutExpired: when it still runs after ``timeout`` seconds.
        """
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal unless the program has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(
    module: str,
    *arguments: object,
    stdout: Path,
    stderr: Path,
    environment: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> Program:
    """Start ``python -m module arguments`` in a fork.

    Args:
        environment: changes to this process's environment.
        before: called in the fork first; has to be picklable.
    """
    require_process_mark()
    variables = {**os.environ, **(environment or {})}
    line = [module, *map(str, arguments)]
    process = FORKS.Process(
        target=_run, args=(line, variables, str(stdout), str(stderr), before), daemon=True
    )
    process.start()
    return Program(process, stdout, stderr)


def run(
    module: str, *arguments: object, folder: Path, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run ``python -m module arguments`` in a fork to its end; its output lies in ``folder``."""
    output, errors = folder / "stdout.log", folder / "stderr.log"
    program = start(module, *arguments, stdout=output, stderr=errors, environment=environment)
    try:
        status = program.wait()
    finally:
        program.kill()
    return subprocess.CompletedProcess(arguments, status, output.read_text(), errors.read_text())


def _run(
    line: list[str],
    variables: dict[str, str],
    stdout: str,
    stderr: str,
    before: Callable[[], None] | None,
) -> None:
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(variables)
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.simplefilter("ignore", RuntimeWarning)  # runpy: the module is imported already
    if before is not None:
        before()
    sys.argv = line
    runpy.run_module(line[0], run_name="__main__", alter_sys=True)


@contextmanager
def interpreter(
    module: str, *arguments: str, **environment: str
) -> Iterator["subprocess.Popen[str]"]:
    """A fresh interpreter with its output in one pipe, for programs that must not be forked.

    The process is killed at the end.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def line_with(process: "subprocess.Popen[str]", text: str) -> str:
    """Wait for a line of the process's output with ``text``, and return it."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return line
    raise AssertionError(f"the process exited without {text!r}:\n{''.join(lines)}")
