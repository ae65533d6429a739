"""Writing to a disk that may be full: what fails is told by path, reason and bytes needed."""

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from safetensors import SafetensorError

from mopd_protocol.errors import DataError


@contextmanager
def explained_writing(path: Path, what: str, *, needed: int, kept: str) -> Generator[None]:
    """Turns what libraries raise when a disk refuses to take more into one sentence.

    Args:
        needed: bytes that are to be written.
        kept: what is still there, and whole.

    Raises:
        DataError: when the disk has too little room to begin with, or while writing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        reason = os.strerror(errno.ENOSPC)
        raise DataError(_sentence(path, what, reason, needed, free, kept))
    try:
        yield
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(path.parent).free
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise DataError(_sentence(path, what, reason, needed, free, kept)) from error


def append_whole(file: FileIO, data: bytes, *, path: Path, durable: bool) -> None:
    """Appends to an unbuffered file: all of it, or nothing when the disk is full.

    Raises:
        DataError: when it could not be written.
    """
    before = os.fstat(file.fileno()).st_size
    try:
        written = 0
        while written < len(data):
            written += file.write(data[written:])
        if durable:
            os.fsync(file.fileno())
    except OSError as error:
        os.ftruncate(file.fileno(), before)  # takes no room, so it works on a full disk too
        free = shutil.disk_usage(path.parent).free
        kept = "all lines before it are whole"
        reason = error.strerror or str(error)
        sentence = _sentence(path, "the next line", reason, len(data), free, kept)
        raise DataError(sentence) from error


def _sentence(path: Path, what: str, reason: str, needed: int, free: int, kept: str) -> str:
    return (
        f"{path}: {what} cannot be written: {reason} ({needed:,} bytes needed, {free:,} free); "
        f"{kept}; make room, and go on with resume_from_checkpoint=true"
    )
