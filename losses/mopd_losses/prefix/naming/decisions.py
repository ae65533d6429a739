"""``Decisions``: how far one token of the student decides each candidate of a teacher, numbered.

The candidates of a text are mostly the same frequent tokens after the same beginnings. What is
found for one of them is an entry of a few columns, and all others are its index.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.naming.cuts import Cuts
from mopd_losses.prefix.text.boundaries import Boundaries
from mopd_losses.prefix.text.strings import Strings
from mopd_losses.prefix.vocabulary.hashed_strings import (
    Hashes,
    Integers,
    joined,
    keys_of,
)
from mopd_losses.prefix.vocabulary.key_table import KeyTable, distinct_keys
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary

#: Candidates kept in memory; beyond, all are discarded and computed again.
_CACHED = 500_000

#: The length of what was not computed yet.
_UNKNOWN = -1

Flags = NDArray[np.bool_]

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Candidates:
    """The ends of tokens that a teacher considers next at each boundary."""

    ids: Integers  # [candidates], the tokens
    starts: Integers  # [candidates], characters of the token before the boundary
    boundaries: Integers  # [candidates], ascending
    likely: Flags  # [candidates], whether bounding tokens are worth finding

    def at(self, indices: Integers) -> "Candidates":
        """Select candidates."""
        return Candidates(
            self.ids[indices], self.starts[indices], self.boundaries[indices], self.likely[indices]
        )

    def texts(self, boundaries: Boundaries) -> Strings:
        """Return the strings beyond the boundaries."""
        text, vocabulary = boundaries.student.text, boundaries.teacher.text.vocabulary
        return Strings.of_tokens(vocabulary, text, self.ids, self.starts)


class Decisions:
    """Decisions on the candidates of one teacher, by tokens of one student.

    A candidate after what the student has begun has two numbers. The second one is for boundaries
    where the student just spelled the candidate's beginning with a shorter token.
    """

    def __init__(self, student: SortedVocabulary, teacher: SortedVocabulary, cuts: Cuts) -> None:
        self._student, self._teacher = student, teacher
        self._cuts = cuts
        self.clear()

    def clear(self) -> None:
        """Remove all decisions; other candidates get their numbers."""
        self._table = KeyTable(1 << 62)  # half of the first number
        self._nodes: Integers = np.zeros(0, dtype=np.int64)  # of the student, of whole candidates
        self.lengths: Integers = np.zeros(0, dtype=np.int64)
        """[numbers], characters that one token decides; 0 if none decides anything."""
        self.hashes: Hashes = np.zeros(0, dtype=np.uint64)
        """[numbers], of these characters."""
        self.nodes: Integers = np.zeros(0, dtype=np.int64)
        """[numbers], the student's, of what is begun and these characters."""
        self.teacher_nodes: Integers = np.zeros(0, dtype=np.int64)
        """[numbers], the teacher's, of these characters."""

    def of(self, candidates: Candidates, boundaries: Boundaries) -> Integers:
        """Return the numbers of candidates, which are valid until the next call."""
        if len(self._table) > _CACHED:
            self.clear()
        student, vocabulary = boundaries.student, self._student
        rows, numbers = student.open_rows, candidates.boundaries
        begun = keys_of(rows.hashes[rows.last], rows.begun[rows.last])
        # A token, and where its end begins.
        ends = (candidates.starts << 32) + candidates.ids

        def compute(indices: Integers) -> Integers:
            return self._added(candidates.at(indices), boundaries)

        entries = self._table.computed(keys_of(begun.take(numbers), ends), compute)
        # A candidate begins with the student's token if its range of tokens is part of that of the
        # token, and it is not shorter.
        own = rows.rows[rows.last]
        tokens = vocabulary.nodes_of(
            student.text.slices(student.text.starts[own], student.text.ends[own])
        )
        nodes = self._nodes.take(entries)
        first, last = vocabulary.node_starts[tokens], vocabulary.node_stops[tokens]
        lengths = self._teacher.lengths.take(candidates.ids) - candidates.starts
        begins = lengths >= boundaries.student_sampled.take(numbers)
        begins &= vocabulary.node_starts.take(nodes) >= first.take(numbers)
        begins &= vocabulary.node_stops.take(nodes) <= last.take(numbers)
        begins &= nodes >= 0
        results = 2 * entries + begins
        unknown = np.flatnonzero(self.lengths.take(results) == _UNKNOWN)
        if len(unknown):
            distinct, at = distinct_keys(results[unknown])
            self._decide(distinct, candidates.at(unknown[at]), boundaries)
        return results

    def _added(self, candidates: Candidates, boundaries: Boundaries) -> Integers:
        """Number candidates."""
        rows = boundaries.student.open_rows
        last = rows.last[candidates.boundaries]
        texts = candidates.texts(boundaries)
        numbers = len(self._table) + np.arange(len(texts))
        stop = len(self._table) + len(texts)
        self._nodes = _grown(self._nodes, stop)
        self.lengths, self.nodes = _grown(self.lengths, 2 * stop), _grown(self.nodes, 2 * stop)
        self.hashes = _grown(self.hashes, 2 * stop)
        self.teacher_nodes = _grown(self.teacher_nodes, 2 * stop)
        self._nodes[numbers] = self._student.nodes_of(
            joined(rows.hashes[last], rows.begun[last], texts.hashes)
        )
        self.lengths[2 * numbers] = self.lengths[2 * numbers + 1] = _UNKNOWN
        return numbers

    def _decide(self, numbers: Integers, candidates: Candidates, boundaries: Boundaries) -> None:
        """Fill the columns of distinct numbers.

        A token of the student that covers a candidate decides it, unless the student just spelled
        the candidate's beginning with a shorter token, never writes that token, or white space at
        the end may belong to the next word: the tokenizer then shows how far one token goes.
        """
        student, rows = boundaries.student, boundaries.student.open_rows
        at = candidates.boundaries
        last = rows.last[at]
        hashes, begun, covering = rows.hashes[last], rows.begun[last], rows.rows[last]
        texts = candidates.texts(boundaries)

        def candidate(entry: int) -> tuple[str, str]:
            return student.context_of(int(at[entry]), int(covering[entry])), texts.string(entry)

        is_uncertain = (numbers & 1 == 1) | (self._nodes[numbers >> 1] < 0)
        is_uncertain |= texts.end_with_space()
        others = np.flatnonzero(~is_uncertain)
        keys = joined(hashes[others], begun[others], texts.hashes[others])
        divided = self._cuts.are_divided(keys, lambda index: candidate(int(others[index])))
        is_uncertain[others] = divided
        uncertain = np.flatnonzero(is_uncertain)
        lengths = texts.lengths.copy()
        lengths[uncertain] = 0
        may_continue = texts.at(uncertain).may_continue(
            self._student, hashes[uncertain], begun[uncertain]
        )
        uncertain = uncertain[may_continue]
        keys = keys_of(hashes[uncertain], begun[uncertain], texts.hashes[uncertain])
        lengths[uncertain] = self._cuts.of(keys, lambda index: candidate(int(uncertain[index])))
        names = texts.beginnings(lengths)
        self.lengths[numbers], self.hashes[numbers] = lengths, names
        self.nodes[numbers] = self._student.nodes_of(joined(hashes, begun, names))
        self.teacher_nodes[numbers] = self._teacher.nodes_of(names)


def _grown(column: NDArray[_Number], count: int) -> NDArray[_Number]:
    """Return a column of at least so many entries, which begins with the given ones."""
    if len(column) >= count:
        return column
    longer = np.empty(2 * count, dtype=column.dtype)
    longer[: len(column)] = column
    return longer
