"""Read-only numpy arrays, so that a frozen value is frozen to its last element."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

IntArray: TypeAlias = NDArray[np.int32]
FloatArray: TypeAlias = NDArray[np.float32]
ArrayLike: TypeAlias = NDArray[Any] | Sequence[Any]


def frozen_array(values: ArrayLike, dtype: DTypeLike) -> NDArray[Any]:
    """Return ``values`` as a C-contiguous read-only array of ``dtype``, copied only if needed.

    An array is copied if its memory is writeable through another array.
    """
    array = np.ascontiguousarray(values, dtype=dtype)
    if isinstance(values, np.ndarray) and np.may_share_memory(array, values) and _writeable(values):
        array = array.copy()
    array.flags.writeable = False
    return array


def _writeable(array: NDArray[Any]) -> bool:
    """Return whether the array, or an array that it is a view of, is writeable."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return True
        owner = owner.base
    return False
