"""``run_lock``: one process at a time writes into a run's folder."""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from mopd_protocol.errors import ConfigError


@contextmanager
def run_lock(folder: Path) -> Generator[None]:
    """Holds the folder, which is made if it is not there and goes again if it stayed empty.

    The folder itself is locked, by the kernel: a process that is killed lets go of it. Where there
    are no such locks (Windows, some network disks) nothing is held.

    Raises:
        ConfigError: when another process holds it, it cannot be made, or nothing written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output_dir {folder} cannot be made: {error.strerror or error}; name another one"
        ) from error
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"output_dir {folder} takes no files: {error.strerror or error}; name another one, or "
            "make room or permission there"
        ) from error
    held = _held(folder)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def _held(folder: Path) -> int | None:
    try:
        import fcntl
    except ImportError:
        return None
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(opened)
        raise ConfigError(
            f"another process is writing a run into output_dir {folder}; wait for it, stop it, or "
            "name another output_dir"
        ) from error
    except OSError:  # the disk knows no locks
        os.close(opened)
        return None
    return opened
