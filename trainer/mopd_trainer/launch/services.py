"""Teacher services in Ray actors, restarted after a crash."""

# ray has incomplete annotations, and need not be installed for type checking.
# pyright: reportMissingImports=false

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util import get_node_ip_address

from mopd_trainer.config.run import RunConfig

logger = logging.getLogger(__name__)

#: A service that exits earlier counts as failed to start.
_STARTED_SECONDS = 60.0
_ATTEMPTS = 5
_STOP_SECONDS = 20.0


def service_actor(config: RunConfig, names: Sequence[str], options: Mapping[str, Any]) -> Any:
    """Create the actor of the teacher services that share a group of devices."""
    commands: dict[str, list[str]] = {}
    keys: dict[str, str] = {}
    for name in names:
        teacher = config.teachers[name]
        assert teacher.serve is not None
        executable = str(Path(sys.executable).parent / "mopd-teacher")
        commands[name] = [executable, "serve", teacher.serve.model, *teacher.serve.arguments]
        keys[name] = os.environ.get(teacher.api_key_env or "", "")
    return ray.remote(TeacherServices).options(**options).remote(commands, keys)


class TeacherServices:
    """Run the teacher services of one group of devices."""

    def __init__(self, commands: Mapping[str, Sequence[str]], keys: Mapping[str, str]) -> None:
        self._commands = commands
        self._keys = keys
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: dict[str, int] = dict.fromkeys(commands, 0)
        self._stopping = threading.Event()
        self._starting = threading.Lock()  # no service starts after stop()

    def start(self) -> dict[str, str]:
        """Start the services; return their addresses by name, which restarts do not change."""
        host = get_node_ip_address()
        urls: dict[str, str] = {}
        for name, command in self._commands.items():
            port = free_port()
            arguments = [*command, "--name", name, "--host", host, "--port", str(port)]
            threading.Thread(target=self._supervise, args=(name, arguments), daemon=True).start()
            urls[name] = f"http://{host}:{port}"
        return urls

    def process_ids(self) -> dict[str, int]:
        """Return the process ids of the services by name."""
        return {name: process.pid for name, process in self._running.items()}

    def starts(self) -> dict[str, int]:
        """Return the number of starts of each service."""
        return dict(self._starts)

    def stop(self) -> None:
        """Stop the services, within seconds."""
        with self._starting:
            self._stopping.set()
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def _supervise(self, name: str, command: Sequence[str]) -> None:
        """Restart a service whenever it exits, until it repeatedly fails to start."""
        failures = 0
        while failures < _ATTEMPTS:
            started = time.monotonic()
            environment = {**os.environ, "MOPD_API_KEYS": self._keys[name]}
            with self._starting:
                if self._stopping.is_set():
                    return
                self._running[name] = subprocess.Popen(command, env=environment)
            self._starts[name] += 1
            code = self._running[name].wait()
            if self._stopping.is_set():
                return
            failures = failures + 1 if time.monotonic() - started < _STARTED_SECONDS else 1
            logger.warning("teacher %r exited with status %d; restarting it", name, code)
            self._stopping.wait(2.0 ** (failures - 1))
        logger.error("teacher %r failed to start after %d attempts", name, failures)


def free_port() -> int:
    """Return a port that is free on this node."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
