"""A real ``mopd-teacher`` process, watched from outside."""

import os
import re
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests import processes
from tests.ports import free_port
from tests.processes import Program

#: Longer than anything here takes; reached only when something is broken.
PATIENCE_SECONDS = 600.0


@dataclass
class RunningTeacher:
    """A process that serves or will serve."""

    process: Program
    url: str
    log: Path
    """The standard error of the process."""
    verify: ssl.SSLContext | bool = True
    """The certificate authorities that are trusted for an https address."""

    def get(self, path: str) -> httpx.Response:
        """Send one GET request."""
        return httpx.get(self.url + path, timeout=PATIENCE_SECONDS, verify=self.verify)

    def metric(self, name: str) -> float:
        """The sum of all series of a metric; 0 without any."""
        lines = re.findall(
            rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.get("/metrics").text, re.M
        )
        return sum(map(float, lines))

    def resident_mebibytes(self) -> float:
        """The resident memory of the process in MiB, as the kernel counts it."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024

    def open_files(self) -> int:
        """The number of open file descriptors of the process."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def until(self, path: str, status: int) -> httpx.Response:
        """Repeat a GET request until the response has this status."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            response = self._try(path)
            if response is not None and response.status_code == status:
                return response
            assert self.process.poll() is None, f"the teacher has ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"no {status} from {path}; last {response}"
            threading.Event().wait(0.01)  # poll: the other process cannot notify this one

    def until_metric(self, name: str, value: float) -> None:
        """Poll until a metric has this value."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (current := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {current}, not {value}"
            threading.Event().wait(0.01)

    def until_open_files(self, at_most: int) -> None:
        """Poll until at most ``at_most`` files are open: connections close with a delay."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (current := self.open_files()) > at_most:
            assert time.monotonic() < deadline, f"{current} files are open, not {at_most}"
            threading.Event().wait(0.01)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_SECONDS)

    def _try(self, path: str) -> httpx.Response | None:
        try:
            return httpx.get(self.url + path, timeout=5.0, verify=self.verify)
        except httpx.TransportError:
            return None


def command(model: Path, port: int, *options: str, name: str = "math") -> list[str]:
    """The arguments of ``mopd-teacher`` on this machine's loopback."""
    line = ["serve", str(model), "--name", name, "--port", str(port), "--device", "cpu"]
    return [*line, "--engine", "transformers", *options]


def environment(**changes: str) -> dict[str, str]:
    """Changes to the environment of a teacher: no keys unless requested."""
    return {"MOPD_API_KEYS": "", **changes}


@contextmanager
def running_teacher(
    model: Path,
    log: Path,
    *options: str,
    ready: bool = True,
    name: str = "math",
    port: int | None = None,
    program: str = "mopd_server.main",
    scheme: str = "http",
    **variables: str,
) -> Iterator[RunningTeacher]:
    """A teacher process, ready to score unless ``ready`` is false; killed at the end."""
    chosen = port or free_port()
    process = processes.start(
        program,
        *command(model, chosen, *options, name=name),
        stdout=Path(os.devnull),
        stderr=log,
        environment=environment(**variables),
    )
    teacher = RunningTeacher(process, f"{scheme}://127.0.0.1:{chosen}", log)
    try:
        if ready:
            teacher.until("/readyz", 200)
        yield teacher
    finally:
        process.kill()
        process.wait()
