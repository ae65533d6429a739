"""``MarkedRanges``: the tokens of a vocabulary that belong to cells with marks."""

from collections.abc import Callable

import numpy as np

from mopd_losses.prefix.vocabulary.hashed_strings import Hashes, Integers
from mopd_losses.prefix.vocabulary.key_table import KeyTable
from mopd_losses.prefix.vocabulary.marks import MarksTable
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary

#: Cells kept in memory; beyond, all are discarded and computed again.
_CACHED = 500_000


class MarkedRanges:
    """Ranges of one vocabulary, one list for each cell, behind what a row has begun."""

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
            lists = [
                self.vocabulary.marked_ranges(begun, text, marks.marks_of(number))
                for begun, text, number in map(cell, indices.tolist())
            ]
            columns = np.array([r for each in lists for r in each], dtype=np.int64).reshape(-1, 2)
            self.starts = np.concatenate([self.starts, columns[:, 0]])
            self.stops = np.concatenate([self.stops, columns[:, 1]])
            numbers = len(self._first) - 1 + np.arange(len(lists))
            ends = self._first[-1] + np.cumsum([len(each) for each in lists])
            self._first = np.concatenate([self._first, ends])
            return numbers

        numbers = self._table.computed(keys, compute)
        return self._first[numbers], self._first[numbers + 1]
