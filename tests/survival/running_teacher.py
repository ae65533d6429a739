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
    """A process that serves, or is about to."""

    process: Program
    url: str
    log: Path
    """What it wrote on stderr."""
    verify: ssl.SSLContext | bool = True
    """Whom to believe about an https address."""

    def get(self, path: str) -> httpx.Response:
        """The answer to one GET."""
        return httpx.get(self.url + path, timeout=PATIENCE_SECONDS, verify=self.verify)

    def metric(self, name: str) -> float:
        """The sum of all series of a metric; 0 where it has none yet."""
        lines = re.findall(
            rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.get("/metrics").text, re.M
        )
        return sum(map(float, lines))

    def resident_mebibytes(self) -> float:
        """Memory that the process holds, as the kernel counts it."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024

    def open_files(self) -> int:
        """File descriptors that the process holds."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def until(self, path: str, status: int) -> httpx.Response:
        """Asks again and again until the answer has this status."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            answered = self._try(path)
            if answered is not None and answered.status_code == status:
                return answered
            assert self.process.poll() is None, f"the teacher has ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"no {status} from {path}; last {answered}"
            threading.Event().wait(0.01)  # another process is awaited, which cannot tell us

    def until_metric(self, name: str, value: float) -> None:
        """Asks again and again until a metric has this value."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {found}, not {value}"
            threading.Event().wait(0.01)

    def until_open_files(self, at_most: int) -> None:
        """Looks again and again until no more files are open; closed connections take a moment."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := self.open_files()) > at_most:
            assert time.monotonic() < deadline, f"{found} files are open, not {at_most}"
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
