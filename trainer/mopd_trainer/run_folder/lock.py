"""``run_lock``: only one process writes to a run folder."""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from mopd_protocol.errors import ConfigError, DiskError


@contextmanager
def run_lock(folder: Path) -> Generator[None]:
    """Create and lock a run folder; remove it at the end if it is empty.

    The folder itself is locked by the kernel, which releases the lock of a killed process. On
    systems without such locks (Windows, some network disks) nothing is locked.

    Raises:
        ConfigError: if another process has the lock.
        DiskError: if the folder cannot be created or is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(
            f"output_dir {folder}: creating the folder failed: {error.strerror or error}. Choose "
            "another one.",
            key=str(folder),
        ) from error
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DiskError(
            f"output_dir {folder}: not writable: {error.strerror or error}. Choose another one, "
            "free disk space or change permissions.",
            key=str(folder),
        ) from error
    lock = _lock(folder)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def _lock(folder: Path) -> int | None:
    """Return a file descriptor that has the lock; None if locks are unsupported."""
    try:
        import fcntl
    except ImportError:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(
            f"output_dir {folder}: locked by another process. Wait for that run, stop it, or "
            "choose another output_dir.",
            key="output_dir",
        ) from error
    except OSError:  # the file system has no locks
        os.close(descriptor)
        return None
    return descriptor
