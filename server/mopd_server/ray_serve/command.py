"""``mopd-teacher deploy``: deploy a file's teachers, and print their states until interrupted."""

import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType

from mopd_protocol.errors import ConfigError, MissingPackageError, first_line
from mopd_server.ray_serve.teachers_file import load_teachers_file

_POLL_SECONDS = 1.0


def run_deploy(
    path: Path, *, action: str, address: str | None, port: int | None, detach: bool
) -> None:
    """Deploy the teachers of a file and print their states until SIGTERM or Ctrl-C.

    With ``detach``, return once all are ready; they stay on the cluster. The other actions are
    ``status``, which prints the states once, and ``stop``, which removes the teachers.

    Raises:
        ConfigError: if the file or the cluster is unsuitable, or a teacher cannot start.
    """
    file = load_teachers_file(path)
    if port is not None:
        file = replace(file, port=port)
    try:
        from mopd_server.ray_serve.cluster import ServeCluster
    except ImportError as error:
        raise MissingPackageError(
            f"mopd-teacher deploy: importing Ray Serve failed: {first_line(error)}. Run pip "
            "install '.[server,ray]'.",
            key="ray",
        ) from error
    cluster = ServeCluster(file, address, existing=detach or action != "deploy")
    if action == "stop":
        cluster.remove()
        return
    if action == "status":
        _print(str(each) for each in cluster.statuses())
        return
    signal.signal(signal.SIGTERM, _exit)
    cluster.deploy()
    try:
        printed: list[str] = []
        while True:
            states = cluster.statuses()
            lines = [str(each) for each in states]
            if all(each.ready for each in states):
                lines.append("all teachers are ready")
            _print(line for line in lines if line not in printed)
            printed = lines
            for each in states:
                if each.failed:
                    raise ConfigError(
                        f"teacher {each.name!r}: no replica can start: {each.message}",
                        key="teachers",
                    )
            if detach and all(each.ready for each in states):
                return
            time.sleep(_POLL_SECONDS)
    finally:
        if not detach:
            cluster.remove()


def _print(lines: Iterable[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
