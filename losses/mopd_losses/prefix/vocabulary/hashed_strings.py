"""Strings as 64-bit hashes, of which joins and slices are arithmetic on arrays.

The hash of a string is the sum of ``number(c_i) * BASE**i`` modulo 2**64, with a random number for
each character. So all strings of a batch (what a row has begun, candidates, cells) are compared,
joined and looked up at once, and a string is built only for a tokenizer. Two of ten million strings
have one hash with probability 3e-6.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Codes = NDArray[np.uint16]

#: Between two texts: no token and no control token has this character.
SEPARATOR = "\uffff"

_WORD = 1 << 64


def _random_numbers(count: int) -> Hashes:
    """SplitMix64, which is the same in every version of numpy: hashes are stored."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


_DRAWN = _random_numbers((1 << 16) + 9)
_NUMBERS = _DRAWN[: 1 << 16]
_BASE = int(_DRAWN[-1]) // 8 * 8 + 5
#: Odd factors: of the parts of a key, in order.
_FACTORS = [int(number) | 1 for number in _DRAWN[1 << 16 : -1].tolist()]


def powers(exponents: Integers) -> Hashes:
    """``BASE ** exponents``."""
    count = 1 << max(int(exponents.max(initial=0)) + 1, 256).bit_length()
    return _powers(count, _BASE).take(exponents)  # half the time of indexing


def inverse_powers(exponents: Integers) -> Hashes:
    """``BASE ** -exponents``."""
    count = 1 << max(int(exponents.max(initial=0)) + 1, 256).bit_length()
    return _powers(count, pow(_BASE, -1, _WORD)).take(exponents)


@cache
def _powers(count: int, base: int) -> Hashes:
    factors = np.full(count, base % _WORD, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def codes_of(text: str) -> Codes:
    """Return the characters of a text as numbers."""
    return np.frombuffer(text.encode("utf-16-le"), dtype=np.uint16)


def prefix_hashes(codes: Codes) -> Hashes:
    """[characters + 1], of the first 0, 1, … characters."""
    terms = _NUMBERS.take(codes) * powers(np.arange(len(codes)))
    return np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(terms, dtype=np.uint64)])


def slice_hashes(prefixes: Hashes, starts: Integers, stops: Integers) -> Hashes:
    """Hash the slices ``[starts, stops)`` of a text with these prefix hashes."""
    return (prefixes.take(stops) - prefixes.take(starts)) * inverse_powers(starts)


def string_hashes(texts: Sequence[str]) -> Hashes:
    """Hash whole strings."""
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    stops = np.cumsum(lengths + 1) - 1
    prefixes = prefix_hashes(codes_of(SEPARATOR.join(texts)))
    return slice_hashes(prefixes, stops - lengths, stops)


def character_hashes(codes: Codes) -> Hashes:
    """Hash strings of one character."""
    return _NUMBERS.take(codes)


def joined(first: Hashes, first_lengths: Integers, second: Hashes) -> Hashes:
    """Hash ``first + second``."""
    return first + powers(first_lengths) * second


def keys_of(*parts: Hashes | Integers) -> Hashes:
    """Hash tuples of hashes and numbers."""
    total = np.zeros(len(parts[0]), dtype=np.uint64)
    for part, factor in zip(parts, _FACTORS, strict=False):
        mixed = part.astype(np.uint64) * np.uint64(factor)
        total = (total ^ (total >> np.uint64(29))) * np.uint64(_FACTORS[-1]) + mixed
    return total ^ (total >> np.uint64(32))


def ranks_in_runs(lengths: Integers) -> Integers:
    """0, 1, … within each run of the given lengths."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def indices_in_runs(first: Integers, last: Integers) -> tuple[Integers, Integers]:
    """Return first, first + 1, … up to last, without it, of each run: the runs, and the indices."""
    lengths = last - first
    runs = np.repeat(np.arange(len(lengths)), lengths)
    return runs, first[runs] + ranks_in_runs(lengths)
