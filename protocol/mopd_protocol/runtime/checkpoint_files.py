"""Consistency of a checkpoint's safetensors files, from their headers.

Engines choose differently where a folder has the weights twice, and transformers converts integers
of a quantized checkpoint to weights where its configuration has been removed.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mopd_protocol.errors import WeightsError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

#: Types of weights that are not quantized.
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
#: A longer header is the text of another kind of file.
_LONGEST_HEADER = 100 * 2**20


def require_consistent_files(subject: str, folder: Path, *, quantized: bool) -> None:
    """Check the safetensors files of a folder; other formats are not checked.

    Args:
        subject: start of the error message.
        folder: folder of the checkpoint.
        quantized: True for a configuration with ``quantization_config``.

    Raises:
        WeightsError: if a file is incomplete, the folder has two sets of weights, or their type is
            that of quantized weights; ``key`` is the file or tensor.
    """
    origin: dict[str, str] = {}
    for path in _files(subject, folder):
        for name, tensor in _header(subject, path).items():
            if name in origin:
                raise WeightsError(
                    f"{subject}: tensor {name} is stored twice (found in {origin[name]} and "
                    f"{path.name}, expected in one file). Download or save the model again.",
                    key=name,
                )
            origin[name] = path.name
            if not quantized and name.endswith(".weight") and tensor["dtype"] not in _FLOATS:
                raise WeightsError(
                    f"{subject}: weights of a quantized model (found type {tensor['dtype']} of "
                    f"{name}, expected floating-point numbers: its config.json has no "
                    "quantization_config). Download the model again, with its config.json.",
                    key=name,
                )


def _files(subject: str, folder: Path) -> list[Path]:
    """Return the files that the index lists, or the single file; none in other formats."""
    index, single = folder / _INDEX, folder / _SINGLE
    if not index.is_file():
        return [single] if single.is_file() else []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{subject}: {_INDEX} is damaged (found {type(error).__name__}: {error}, expected "
            "weight_map with a file per tensor). Download or save the model again.",
            key=_INDEX,
        ) from error
    if single.is_file() and _SINGLE not in names:
        raise WeightsError(
            f"{subject}: two sets of weights (found {_SINGLE} and {_INDEX}, which lists "
            f"{len(names)} other files; expected one of the two). Remove the older one.",
            key=_SINGLE,
        )
    for name in names:
        if not (folder / name).is_file():
            raise WeightsError(
                f"{subject}: a file of the weights is missing (found {name} in {_INDEX}, expected "
                "the file next to it). Download or save the model again.",
                key=str(name),
            )
    return [folder / name for name in names]


def _header(subject: str, path: Path) -> Mapping[str, Any]:
    """Return tensor name -> description.

    Raises:
        WeightsError: if the file is not the header and the bytes of all tensors.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            text = file.read(min(length, _LONGEST_HEADER))
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        expected = 8 + length + end
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        start = path.open("rb").read(24)
        raise WeightsError(
            f"{subject}: {path.name} is not a safetensors file, or only its start (found {size} "
            f"bytes that begin with {start!r}). Download the model again.",
            key=path.name,
        ) from error
    if size != expected:
        raise WeightsError(
            f"{subject}: {path.name} is incomplete or damaged (found {size} bytes, expected "
            f"{expected} by its header). Download the model again.",
            key=path.name,
        )
    return header
