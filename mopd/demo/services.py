"""Teacher services as subprocesses, started in parallel and always stopped."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError

from mopd_protocol import MissingPackageError, TeacherError

_ADDRESS = "address"
_STOP_SECONDS = 20.0
_PROBE_SECONDS = 5.0
_POLL_SECONDS = 0.02


@contextmanager
def teacher_services(
    models: Mapping[str, Path], log_folder: Path, options: Sequence[str] = ()
) -> Generator[dict[str, str]]:
    """Start one ``mopd-teacher serve`` per model on free ports; yield teacher name -> address.

    All services are ready to score inside the block and stopped on exit.

    Raises:
        TeacherError: if a service does not start, with the last line of its log.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    logs = {name: log_folder / f"{name}.log" for name in models}
    with ExitStack() as stack:
        # Start all before waiting: loading a model takes seconds.
        processes = {
            name: stack.enter_context(_process(name, folder, logs[name], options))
            for name, folder in models.items()
        }
        addresses = {
            name: _address(name, process, logs[name]) for name, process in processes.items()
        }
        for name, process in processes.items():
            _wait_until_ready(name, process, addresses[name], logs[name])
        yield addresses


@contextmanager
def _process(
    name: str, folder: Path, log: Path, options: Sequence[str]
) -> Generator[subprocess.Popen[str]]:
    command = [str(_executable()), "serve", str(folder), "--name", name, "--port", "0", *options]
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # One thread each: student and teachers share a small machine.
            env={**os.environ, "OMP_NUM_THREADS": "1", "MOPD_API_KEYS": ""},
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _address(name: str, process: subprocess.Popen[str], log: Path) -> str:
    """Return the address from the startup message."""
    assert process.stdout is not None
    for line in process.stdout:
        words = line.split()
        if words and words[0] == _ADDRESS:
            return words[1]
    raise _not_started(name, log)


def _wait_until_ready(name: str, process: subprocess.Popen[str], address: str, log: Path) -> None:
    """Wait for the warm-up, which ends after the address is printed."""
    while process.poll() is None:
        if _status(f"{address}/readyz") == HTTPStatus.OK:
            return
        if _status(f"{address}/healthz") == HTTPStatus.SERVICE_UNAVAILABLE:
            break  # the warm-up failed
        time.sleep(_POLL_SECONDS)
    raise _not_started(name, log)


def _status(url: str) -> int | None:
    """Return the HTTP status; None if unreachable."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_PROBE_SECONDS) as response:
            return response.status
    except HTTPError as error:
        return error.code
    except OSError:
        return None


def _not_started(name: str, log: Path) -> TeacherError:
    lines = log.read_text(encoding="utf-8").strip().splitlines()
    last = lines[-1] if lines else "empty log"
    return TeacherError(f"teacher {name!r}: failed to start (found {last!r}). See {log}.")


def _executable() -> Path:
    executable = Path(sys.executable).parent / "mopd-teacher"
    if not executable.exists():
        raise MissingPackageError(
            "mopd-teacher: not found next to this Python. Run pip install '.[server,trainer]'.",
            key="mopd-teacher",
        )
    return executable
