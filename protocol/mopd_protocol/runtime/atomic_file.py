"""Files and folders that are either whole or not there, also after a kill or a power cut."""

import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_PART = re.compile(r"\..+\.\d+(\.old)?\.part")


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Generator[Path]:
    """A temporary path beside ``path`` to write to; it takes the name at the end of the block.

    When the block raises, the temporary file goes and an earlier file stays as it was.

    Args:
        durable: whether the file is to survive a power cut; what can be made again need not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _part(path)
    try:
        yield temporary
        if durable:
            _sync(temporary)
        os.replace(temporary, path)
        if durable:
            _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Generator[Path]:
    """A new temporary folder beside ``path`` to fill; it takes the name at the end of the block.

    When the block raises, the temporary folder goes and an earlier folder stays as it was.
    Everything is on the disk before the name is: no power cut leaves a name with less behind it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, earlier = _part(path), path.with_name(f".{path.name}.{os.getpid()}.old.part")
    for leftover in (temporary, earlier):  # of a killed process of this number
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        if path.exists():
            os.replace(path, earlier)  # a folder cannot be renamed over one that holds files
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        if earlier.exists() and not path.exists():
            os.replace(earlier, path)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(earlier, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Removes a folder so that a kill never leaves a part of it under its name."""
    leaving = _part(path)
    os.replace(path, leaving)
    _sync(path.parent)
    shutil.rmtree(leaving, ignore_errors=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Removes what processes that were killed while writing left in a folder (not deeper).

    Only where no other process writes: what it has not finished would go too.
    """
    if not folder.is_dir():
        return []
    found = sorted(path for path in folder.iterdir() if _PART.fullmatch(path.name))
    for path in found:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return found


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent) / name)
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
