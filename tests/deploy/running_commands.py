"""Starts the commands of the deployment files on this machine, with tiny models in place."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mopd_server.main import parser
from tests import processes
from tests.ports import free_port
from tests.survival.running_teacher import RunningTeacher, environment

#: Options whose values belong to the place where the command runs.
_PLACED = ("--port", "--host", "--device", "--engine", "--api-key-file")


@dataclass(frozen=True)
class StartedCommand:
    """A teacher as a deployment file starts it."""

    teacher: RunningTeacher
    port: int


def placed(command: Sequence[str], model: Path, port: int, keys: Path) -> list[str]:
    """The same command with another model, device, port and key file, otherwise unchanged."""
    parsed = parser().parse_args(command)
    local = {
        "--port": str(port),
        "--host": "127.0.0.1",
        "--device": "cpu",
        "--engine": "transformers",
        "--api-key-file": str(keys),
    }
    kept: list[str] = []
    words = iter(command)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in _PLACED:
            if not equals:
                next(words)
        elif word == parsed.model:
            kept.append(str(model))
        else:
            kept.append(word)
    return [*kept, *(f"{name}={value}" for name, value in local.items())]


def start(
    stack: ExitStack, commands: Mapping[str, Sequence[str]], model: Path, keys: Path, logs: Path
) -> dict[str, StartedCommand]:
    """All of them at once; each is killed when the stack is left."""
    started: dict[str, StartedCommand] = {}
    for where, command in commands.items():
        port = free_port()
        log = logs / f"{where.replace(' ', '-')}.log"
        process = processes.start(
            "mopd_server.main",
            *placed(command, model, port, keys),
            stdout=Path(os.devnull),
            stderr=log,
            environment=environment(),
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        running = RunningTeacher(process, f"http://127.0.0.1:{port}", log)
        started[where] = StartedCommand(running, port)
    return started
