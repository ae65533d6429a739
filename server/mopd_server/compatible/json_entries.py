"""JSON of ids and log-probabilities, built as arrays of bytes.

An object for every entry would cost more than the scores, and keep the interpreter's lock while it
is encoded. Here every entry has the same number of bytes: its parts are columns of an array, and
shorter numbers follow spaces, which JSON allows between tokens. NumPy fills the columns without the
lock.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.arrays import FloatArray

#: Log-probability of impossible tokens in vLLM's responses: JSON has no infinity.
LOWEST_LOGPROB = -9999.0

#: Digits after the decimal point: 5e-9 nats.
_DECIMALS = 8
_GROUP = 10**4  # two groups of four digits

#: Texts of one length.
Texts = NDArray[np.bytes_]


def logprob_texts(logprobs: FloatArray) -> Sequence[Texts]:
    """Return the columns of log-probabilities, each of the shape of ``logprobs``.

    Values above 0 (rounding) are written as 0, and those below ``LOWEST_LOGPROB`` as that.
    """
    scaled = np.clip(logprobs.astype(np.float64), LOWEST_LOGPROB, 0.0) * -(10.0**_DECIMALS)
    whole, decimals = np.divmod(np.rint(scaled).astype(np.int64), 10**_DECIMALS)
    high, low = np.divmod(decimals, _GROUP)
    return number_texts(whole, b"-", b"."), _four_digits()[high], _four_digits()[low]


def number_texts(numbers: NDArray[np.integer], before: bytes, after: bytes) -> Texts:
    """Return numbers from 0 between two texts, after spaces; negative ones are those of 0."""
    highest = int(numbers.max(initial=0))
    # The next power of two, so that few tables are made.
    return _table(1 << highest.bit_length(), before, after)[np.maximum(numbers, 0)]


def join_columns(shape: tuple[int, ...], columns: Sequence[Texts | bytes]) -> Texts:
    """Return the texts of ``shape`` that consist of the columns, which are broadcast."""
    arrays = [np.asarray(column) for column in columns]
    fields: Any = [(f"column_{index}", array.dtype) for index, array in enumerate(arrays)]
    joined = np.empty(shape, dtype=fields)
    for (name, _), array in zip(fields, arrays, strict=True):
        joined[name] = array
    return joined.view(f"S{joined.dtype.itemsize}")


def join_rows(texts: Texts) -> Texts:
    """Return the concatenated texts of every row: ``[rows, columns]`` -> ``[rows, 1]``."""
    return texts.view(f"S{texts.shape[1] * texts.dtype.itemsize}")


def blank(texts: Texts, where: NDArray[np.bool_]) -> None:
    """Replace texts by spaces."""
    texts[where] = b" " * texts.dtype.itemsize


@lru_cache(maxsize=32)
def _table(count: int, before: bytes, after: bytes) -> Texts:
    width = len(before) + len(str(count - 1)) + len(after)
    texts = [(before + b"%d" % number + after).rjust(width) for number in range(count)]
    return np.array(texts, dtype=f"S{width}")


@lru_cache(maxsize=1)
def _four_digits() -> Texts:
    return np.array([b"%04d" % number for number in range(_GROUP)], dtype="S4")
