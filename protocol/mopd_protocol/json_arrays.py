"""Arrays from the lists of a JSON document, of exactly the type that the field has."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.errors import DataError

_LARGEST = int(np.iinfo(np.int32).max)


def json_integers(document: Mapping[str, Any], name: str) -> NDArray[np.int32]:
    """Return a field of integers; numpy would also accept fractions and numerals.

    Raises:
        DataError: if a value is not an integer of 32 bits.
        ValueError: if rows have different lengths.
    """
    array = np.array(document[name])
    if array.size and array.dtype.kind != "i":
        raise DataError(f"{name} of a scores document are not integers", key=name)
    if array.size and max(-int(array.min()), int(array.max())) > _LARGEST:
        raise DataError(f"{name} of a scores document exceed 32 bits", key=name)
    return array.astype(np.int32)


def json_logprobs(document: Mapping[str, Any], name: str) -> NDArray[np.float32]:
    """Return a field of numbers; None stands for -inf.

    Raises:
        DataError: if a value is neither a number nor None.
        ValueError: if rows have different lengths.
    """
    values = np.array(document[name], dtype=object)
    types: set[type] = set(map(type, values.ravel().tolist()))
    if list in types:
        raise ValueError(f"{name} of a scores document has rows of different lengths")
    if not types <= {float, int, type(None)}:
        raise DataError(f"{name} of a scores document are not numbers", key=name)
    missing = values == None  # noqa: E711, elementwise
    # None becomes NaN
    return np.where(missing, np.float32(-np.inf), values.astype(np.float32))
