"""Atomic writes: files and folders are complete or missing, even after a kill or a power cut."""

import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_PART = re.compile(r"\..+\.\d+(\.old)?\.part")


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Generator[Path]:
    """Yield a temporary path next to ``path``; it is renamed to ``path`` at the end of the block.

    If the block raises, the temporary file is removed and an earlier file stays unchanged.

    Args:
        durable: whether the file must survive a power cut; not needed for reproducible files.
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
    """Yield a new temporary folder next to ``path``; it is renamed at the end of the block.

    If the block raises, the temporary folder is removed and an earlier folder stays unchanged. All
    content is flushed to disk before the rename: no power cut leaves an incomplete folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, earlier = _part(path), path.with_name(f".{path.name}.{os.getpid()}.old.part")
    for leftover in (temporary, earlier):  # of a killed process with this pid
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        if path.exists():
            os.replace(path, earlier)  # a folder cannot be renamed over one that contains files
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        if earlier.exists() and not path.exists():
            os.replace(earlier, path)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(earlier, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder atomically: a kill never leaves an incomplete folder at ``path``."""
    leaving = _part(path)
    os.replace(path, leaving)
    _sync(path.parent)
    shutil.rmtree(leaving, ignore_errors=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove temporary files of killed processes from a folder (not recursively).

    Safe only if no other process writes to the folder: its temporary files are removed too.
    """
    if not folder.is_dir():
        return []
    leftovers = sorted(path for path in folder.iterdir() if _PART.fullmatch(path.name))
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return leftovers


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
