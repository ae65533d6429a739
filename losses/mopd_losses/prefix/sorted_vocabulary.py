"""``SortedVocabulary``: the tokens of one side in the order of their bytes.

All tokens that begin with a string are one contiguous range of ranks, so the mass of "the text
continues with this string" in one row is a sum over a range. Strings are bytes as Latin-1
characters; a control token is one private character above them, the same on both sides for one
role or name.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.tokenizers.token_table import TokenTable

#: Sorts behind every character of a string.
_HIGHEST_CHARACTER = "\U0010ffff"

#: Ranges kept in memory; beyond, all are discarded and computed again.
_CACHED_RANGES = 500_000


#: Texts longer than a cell's, in order, and whether they belong to the cell: the longest one with
#: which a string begins decides.
Marks = tuple[tuple[str, bool], ...]


class PrefixRange(NamedTuple):
    """Ranks ``[start, stop)`` of the tokens that begin with a string; from ``longer`` on they have
    more characters than the string."""

    start: int
    longer: int
    stop: int


def utf8_text(string: str) -> str | None:
    """Return the text of a string of bytes; None for a control token or half a character, which no
    tokenizer takes as text."""
    try:
        return string.encode("latin-1").decode()
    except UnicodeError:
        return None


def control_characters(*tables: TokenTable) -> dict[str, str]:
    """Return the private character of each control token's name."""
    names = sorted({name for table in tables for name in table.marks.values()})
    return {name: control_character(number) for number, name in enumerate(names)}


def control_character(number: int) -> str:
    """Return the character of the control token with this number, above every byte."""
    return chr(0x100 + number)


class SortedVocabulary:
    """Tokens sorted by their strings.

    Args:
        controls: name of a control token -> its private character.
    """

    def __init__(self, table: TokenTable, controls: Mapping[str, str]) -> None:
        self.table = table
        self.strings = [spelled.decode("latin-1") for spelled in table.all_bytes]  # by id
        for token_id, name in table.marks.items():
            self.strings[token_id] = controls[name]
        tokens = [token_id for token_id, string in enumerate(self.strings) if string]
        tokens.sort(key=self.strings.__getitem__)
        self._keys = [self.strings[token_id] for token_id in tokens]
        self.ids: NDArray[np.int64] = np.array(tokens, dtype=np.int64)  # [tokens], by rank
        self.ranks: NDArray[np.int64] = np.full(len(self.strings), -1, dtype=np.int64)
        """[vocabulary], rank of each id; -1 for ids without a string."""
        self.ranks[self.ids] = np.arange(len(tokens))
        self._ranges: dict[str, PrefixRange] = {}
        self._marked: dict[tuple[str, str, Marks], list[tuple[int, int]]] = {}
        self._following: dict[str, frozenset[str]] = {}
        self._frequent: dict[tuple[str, int], list[str]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def string_at(self, rank: int) -> str:
        """Return the string of the token with this rank."""
        return self._keys[rank]

    def covers(self, prefix: str) -> bool:
        """Return whether any token begins with ``prefix``."""
        tokens = self.range_of(prefix)
        return tokens.start < tokens.stop

    def ranges_of(self, begun: str, text: str, marks: Marks) -> list[tuple[int, int]]:
        """Return the ranges of the tokens that begin with ``begun`` and ``text`` and belong to the
        cell ``text``, as its marks decide."""
        tokens = self.range_of(begun + text)
        if not marks or tokens.start == tokens.stop:
            return [(tokens.start, tokens.stop)] if tokens.start < tokens.stop else []
        ranges = self._marked.get((begun, text, marks))
        if ranges is None:
            if len(self._marked) >= _CACHED_RANGES:
                self._marked.clear()
            ranges = self._marked_ranges(begun, tokens, marks)
            self._marked[begun, text, marks] = ranges
        return ranges

    def frequent_tokens(self, prefix: str, count: int) -> list[str]:
        """Return at most ``count`` tokens that are longer than ``prefix`` and begin with it: those
        with the lowest ids, which tokenizers are trained to merge first."""
        cached = self._frequent.get((prefix, count))
        if cached is None:
            if len(self._frequent) >= _CACHED_RANGES:
                self._frequent.clear()
            tokens = self.range_of(prefix)
            ids = self.ids[tokens.longer : tokens.stop]
            if len(ids) > count:
                ids = np.partition(ids, count)[:count]
            cached = [self.strings[token] for token in np.sort(ids).tolist()]
            self._frequent[prefix, count] = cached
        return cached

    def following(self, prefix: str) -> frozenset[str]:
        """Return the characters with which tokens continue ``prefix``."""
        cached = self._following.get(prefix)
        if cached is None:
            if len(self._following) >= _CACHED_RANGES:
                self._following.clear()
            tokens = self.range_of(prefix)
            longer = self._keys[tokens.longer : tokens.stop]
            cached = self._following[prefix] = frozenset(key[len(prefix)] for key in longer)
        return cached

    def range_of(self, prefix: str) -> PrefixRange:
        """Return the ranks of all tokens that begin with ``prefix``."""
        cached = self._ranges.get(prefix)
        if cached is None:
            if len(self._ranges) >= _CACHED_RANGES:
                self._ranges.clear()
            start = bisect_left(self._keys, prefix)
            stop = bisect_left(self._keys, prefix + _HIGHEST_CHARACTER, lo=start)
            longer = bisect_right(self._keys, prefix, lo=start, hi=stop)
            cached = self._ranges[prefix] = PrefixRange(start, longer, stop)
        return cached

    def _marked_ranges(
        self, begun: str, tokens: PrefixRange, marks: Marks
    ) -> list[tuple[int, int]]:
        # Ranges of marks are nested or disjoint; the innermost mark decides.
        outer: list[tuple[int, bool]] = [(tokens.stop, True)]
        edges: list[tuple[int, bool]] = [(tokens.start, True)]  # from this rank on
        for longer, belongs in marks:
            inner = self.range_of(begun + longer)
            while outer[-1][0] <= inner.start and len(outer) > 1:
                stop, _ = outer.pop()
                edges.append((stop, outer[-1][1]))
            edges.append((inner.start, belongs))
            outer.append((inner.stop, belongs))
        while len(outer) > 1:
            stop, _ = outer.pop()
            edges.append((stop, outer[-1][1]))
        parts: list[tuple[int, int]] = []
        stops = [start for start, _ in edges[1:]] + [tokens.stop]
        for (start, belongs), stop in zip(edges, stops, strict=True):
            if belongs and start < stop:
                if parts and parts[-1][1] == start:
                    start = parts.pop()[0]
                parts.append((start, stop))
        return parts
