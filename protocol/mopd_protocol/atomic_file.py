"""Files and folders that are either whole or not there."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A temporary path beside ``path`` to write to; it takes the name at the end of the block.

    When the block raises, the temporary file goes and an earlier file stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Generator[Path]:
    """A new temporary folder beside ``path`` to fill; it takes the name at the end of the block.

    When the block raises, the temporary folder goes and an earlier folder stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    shutil.rmtree(temporary, ignore_errors=True)  # what a killed process of this number left
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            shutil.rmtree(path)  # a folder cannot be renamed over one that holds files
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
