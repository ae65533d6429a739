"""Teacher services as separate processes, started together and always stopped."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError

from mopd_protocol.errors import ConfigError, TeacherError

_ADDRESS = "address"
_STOP_SECONDS = 20.0
_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.02


@contextmanager
def teacher_services(models: Mapping[str, Path], log_folder: Path) -> Generator[dict[str, str]]:
    """Teacher name -> address, one ``mopd-teacher serve`` each, on free ports of this machine.

    All are ready to score when the block begins. Every process has ended when it is left, however
    it is left.

    Raises:
        TeacherError: when one does not start; the end of its log is told.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    logs = {name: log_folder / f"{name}.log" for name in models}
    with ExitStack() as stack:
        # All are started before any is waited for: loading a model takes seconds.
        started = {
            name: stack.enter_context(_process(name, folder, logs[name]))
            for name, folder in models.items()
        }
        found = {name: _address(name, process, logs[name]) for name, process in started.items()}
        for name, process in started.items():
            _wait_until_ready(name, process, found[name], logs[name])
        yield found


@contextmanager
def _process(name: str, folder: Path, log: Path) -> Generator[subprocess.Popen[str]]:
    command = [str(_executable()), "serve", str(folder), "--name", name, "--port", "0"]
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # One thread each: the student and its teachers share a small machine.
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
    """Reads the start message up to the line that tells the address."""
    assert process.stdout is not None
    for line in process.stdout:
        words = line.split()
        if words and words[0] == _ADDRESS:
            return words[1]
    raise _not_started(name, log)


def _wait_until_ready(name: str, process: subprocess.Popen[str], address: str, log: Path) -> None:
    """A teacher tells its address before its warm-up, and refuses requests until that is over."""
    while process.poll() is None:
        if _status(f"{address}/readyz") == HTTPStatus.OK:
            return
        if _status(f"{address}/healthz") == HTTPStatus.SERVICE_UNAVAILABLE:
            break  # its warm-up has failed, and it will never be ready
        time.sleep(_POLL_SECONDS)
    raise _not_started(name, log)


def _status(url: str) -> int | None:
    """None: no answer."""
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with directly.open(url, timeout=_ANSWER_SECONDS) as answer:
            return answer.status
    except HTTPError as error:
        return error.code
    except OSError:
        return None


def _not_started(name: str, log: Path) -> TeacherError:
    told = log.read_text(encoding="utf-8").strip().splitlines()
    return TeacherError(
        f"teacher {name!r} did not start: {told[-1] if told else 'it said nothing'} (log: {log})"
    )


def _executable() -> Path:
    found = Path(sys.executable).parent / "mopd-teacher"
    if not found.exists():
        raise ConfigError(
            "mopd-teacher is not installed beside this Python; the demo needs the server extra: "
            "pip install 'mopd[server,trainer]'"
        )
    return found
