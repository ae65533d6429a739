"""Disk errors with path, reason and bytes required."""

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from safetensors import SafetensorError

from mopd_protocol.errors import DiskError


@contextmanager
def disk_errors(path: Path, what: str, *, needed: int, kept: str) -> Generator[None]:
    """Convert errors of libraries on a full disk to a DiskError.

    Args:
        needed: bytes to write.
        kept: which existing files remain complete, for the message.

    Raises:
        DiskError: if free space is too small, or writing fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise _error(path, what, os.strerror(errno.ENOSPC), needed, kept)
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise _error(path, what, reason, needed, kept) from error


def append_line(file: FileIO, data: bytes, *, path: Path, durable: bool) -> None:
    """Append all data to an unbuffered file, or nothing if writing fails.

    Args:
        durable: synchronise the file with the disk.

    Raises:
        DiskError: if writing fails.
    """
    size_before = os.fstat(file.fileno()).st_size
    try:
        written = 0
        while written < len(data):
            written += file.write(data[written:])
        if durable:
            os.fsync(file.fileno())
    except OSError as error:
        os.ftruncate(file.fileno(), size_before)  # needs no space, so it works on a full disk
        reason, kept = error.strerror or str(error), "all previous lines are complete"
        raise _error(path, "the next line", reason, len(data), kept) from error


def _error(path: Path, what: str, reason: str, needed: int, kept: str) -> DiskError:
    free = shutil.disk_usage(path.parent).free
    return DiskError(
        f"{path}: writing {what} failed: {reason} ({needed:,} bytes required, {free:,} free; "
        f"{kept}). Free disk space, then resume with resume_from_checkpoint=true.",
        key=str(path),
    )
