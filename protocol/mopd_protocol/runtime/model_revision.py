"""Revision of a model's weights: the hub's commit, or a hash over samples of the weight files.

The index of a checkpoint, and the header of a safetensors file, are the same for every fine-tune
of one architecture, so they cannot distinguish two teachers; bytes of the weights can. Hashing all
of them would read the whole checkpoint twice, so blocks are taken evenly from every file.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin")

#: ``name`` or ``organization/name``.
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

_BLOCKS = 256
_BLOCK_BYTES = 4096


def is_missing_folder(model: str) -> bool:
    """Return True for the path of a folder that does not exist: it cannot be a name of the hub,
    where a request would be retried for a minute."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return False
    is_path = folder.is_absolute() or model.startswith((".", "~")) or not _HUB_NAME.fullmatch(model)
    return is_path or (len(folder.parts) == 2 and folder.parent.is_dir())


def name_of(model: str) -> str:
    """A folder's name, not its path (the same folder elsewhere gives the same scores), or a hub
    id."""
    return folder_name(model) if Path(model).is_dir() else model


def folder_name(model: str) -> str:
    """The last component of a path, also of one such as ``.``; links keep their own name."""
    return os.path.basename(os.path.abspath(model))


def revision_of(model: str, config: object, *, requested: str | None = None) -> str:
    """Return the hub commit that transformers read ``config`` from, else a hash of the folder's
    weights.

    Args:
        requested: commit, branch or tag that was requested from the hub. A branch moves, and a
            folder has none, so the same value could name several weights: used only if
            transformers does not report the commit.
    """
    folder = Path(model)
    if not folder.is_dir():
        # transformers keeps the resolved commit here and offers no public name for it.
        return getattr(config, "_commit_hash", None) or requested or "unknown"
    return hash_of_weights(folder)


def hash_of_weights(folder: Path, *, config: str = "config.json") -> str:
    """32 hex digits over the configuration, and names, sizes and samples of the weights' files."""
    digest = hashlib.sha256()
    weights = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    for path in (folder / config, *weights):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        for sample in _samples(path, size):
            digest.update(sample)
    return digest.hexdigest()[:32]


def _samples(path: Path, size: int) -> Iterator[bytes]:
    """Yield small files completely; of large files, evenly spaced blocks."""
    with path.open("rb") as file:
        if size <= _BLOCKS * _BLOCK_BYTES:
            yield file.read()
            return
        for block in range(_BLOCKS):
            file.seek(block * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
            yield file.read(_BLOCK_BYTES)
