"""``MarkedRanges``: the tokens of a vocabulary that belong to cells with marks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mopd_losses.prefix.vocabulary.hashed_strings import (
    Hashes,
    Integers,
    string_hashes,
)
from mopd_losses.prefix.vocabulary.key_table import KeyTable
from mopd_losses.prefix.vocabulary.marks import Marks, MarksTable
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary

#: Cells kept in memory; beyond, all are discarded and computed again.
_CACHED = 500_000


class MarkedCell(NamedTuple):
    """A cell's text after what a row has begun, and its marks."""

    begun: str
    text: str
    marks: Marks


class MarkedRanges:
    """Ranges of one vocabulary, one list for each cell, after what a row has begun."""

    def __init__(self, vocabulary: SortedVocabulary) -> None:
        self.vocabulary = vocabulary
        self.clear()

    def clear(self) -> None:
        """Remove all ranges."""
        self._table = KeyTable(1 << 62)  # a list's number
        self.starts: Integers = np.zeros(0, dtype=np.int64)  # ranks, of all lists
        self.stops: Integers = np.zeros(0, dtype=np.int64)
        self._first: Integers = np.zeros(1, dtype=np.int64)  # [lists + 1]

    def of(
        self, keys: Hashes, cell: Callable[[int], tuple[str, str, int]], marks: MarksTable
    ) -> tuple[Integers, Integers]:
        """Return where the ranges of each cell begin and end in ``starts`` and ``stops``.

        Args:
            keys: of a node, the characters that are begun, and marks.
            cell: index of a key -> what is begun, the cell's text, and the number of its marks.
        """
        if len(self._table) > _CACHED:
            self.clear()

        def compute(indices: Integers) -> Integers:
            cells = [
                MarkedCell(begun, text, marks.marks_of(number))
                for begun, text, number in map(cell, indices.tolist())
            ]
            starts, stops, counts = ranges_of(self.vocabulary, cells)
            self.starts = np.concatenate([self.starts, starts])
            self.stops = np.concatenate([self.stops, stops])
            numbers = len(self._first) - 1 + np.arange(len(cells))
            self._first = np.concatenate([self._first, self._first[-1] + np.cumsum(counts)])
            return numbers

        numbers = self._table.computed(keys, compute)
        return self._first[numbers], self._first[numbers + 1]


def ranges_of(
    vocabulary: SortedVocabulary, cells: Sequence[MarkedCell]
) -> tuple[Integers, Integers, Integers]:
    """Return the ranges of the tokens that begin with ``begun`` and ``text`` and belong to the cell
    ``text``, as its marks decide: ranks ``[starts, stops)`` of all cells, and [cells], how many
    each has."""
    # A cell's text and its marks, in the order of strings: a range is part of those before it that
    # are not over, or disjoint with them.
    texts: list[str] = []
    flags: list[bool] = []
    counts = np.array([1 + len(cell.marks) for cell in cells], dtype=np.int64)
    for begun, text, marks in cells:
        texts.append(begun + text)
        texts += [begun + longer for longer, _ in marks] if begun else [each[0] for each in marks]
        flags.append(True)
        flags += [each[1] for each in marks]
    belongs = np.array(flags, dtype=np.bool_)
    nodes = vocabulary.nodes_of(string_hashes(texts))
    is_cell = np.zeros(len(texts), dtype=np.bool_)
    is_cell[np.cumsum(counts) - counts] = True
    kept = np.flatnonzero((nodes >= 0) | is_cell)
    nodes, belongs, is_cell = nodes[kept], belongs[kept], is_cell[kept]
    owners = np.cumsum(is_cell) - 1
    origins = owners * (len(vocabulary) + 1)
    starts, stops = origins + vocabulary.node_starts[nodes], origins + vocabulary.node_stops[nodes]
    # The range that a range is part of: the one before it, or what that one is part of, or so on.
    outer = np.maximum(np.arange(len(kept)) - 1, 0)
    over = np.flatnonzero((stops[outer] <= starts) & ~is_cell)
    while len(over):
        outer[over] = outer[outer[over]]
        over = over[stops[outer[over]] <= starts[over]]
    # From each edge on, the innermost range decides. Of the edges at one rank, the last one counts:
    # an inner range ends before an outer one, and all that end do before others begin.
    after = np.where(is_cell, False, belongs[outer])
    edges = np.concatenate([stops[::-1], starts])
    decided = np.concatenate([after[::-1], belongs])
    order = np.argsort(edges, kind="stable")
    edges, decided = edges[order], decided[order]
    owners = np.concatenate([owners[::-1], owners])[order]
    parts = np.flatnonzero(decided[:-1] & (edges[:-1] < edges[1:]))
    starts, stops, owners = edges[parts], edges[parts + 1], owners[parts]
    begins = np.ones(len(parts), dtype=np.bool_)
    begins[1:] = (starts[1:] != stops[:-1]) | (owners[1:] != owners[:-1])
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(parts)) - 1 if len(first) else first
    owners = owners[first]
    origins = owners * (len(vocabulary) + 1)
    return (
        starts[first] - origins,
        stops[last] - origins,
        np.bincount(owners, minlength=len(cells)),
    )
