"""``NestedNames``: the names of a boundary of which one begins with another one.

A name is a cell unless it belongs to a shorter one. Most shorter ones have no marks and contain all
that begins with them; of the others, most longer names neither begin with another such name nor
are the beginning of one.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.text.boundaries import Boundaries
from mopd_losses.prefix.text.strings import Strings
from mopd_losses.prefix.vocabulary.hashed_strings import Integers, keys_of
from mopd_losses.prefix.vocabulary.marks import UNMARKED, MarksTable

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Names:
    """Strings at each boundary."""

    texts: Strings  # [names]
    boundaries: Integers  # [names], ascending
    likely: Flags  # [names], whether bounding tokens are worth finding


@dataclass(frozen=True, eq=False)
class NestedNames:
    """Names in the order of boundaries and strings, with those that they begin with."""

    names: Names
    sides: Boundaries
    marks: MarksTable
    starts: Integers  # [names], ranks of the student's tokens, of all boundaries
    stops: Integers  # [names]
    is_nested: Flags  # [names], whether a name begins with another one
    roots: Integers  # [names], the shortest of these, or the name itself

    @classmethod
    def of(
        cls, names: Names, nodes: Integers, sides: Boundaries, marks: MarksTable
    ) -> "NestedNames":
        """Find what each name begins with.

        Args:
            nodes: [names], see ``CellNames``.
        """
        vocabulary, count = sides.student.text.vocabulary, len(nodes)
        origins = names.boundaries * (len(vocabulary) + 1)
        starts = origins + vocabulary.node_starts.take(nodes)
        stops = origins + vocabulary.node_stops.take(nodes)  # 0 without a node
        # A prefix sorts before any text that begins with it, and its ranks enclose theirs.
        is_nested = np.zeros(count, dtype=np.bool_)
        is_nested[1:] = np.maximum.accumulate(stops)[:-1] > starts[1:]
        is_nested &= nodes >= 0
        roots = np.where(is_nested, 0, np.arange(count))
        roots = np.maximum.accumulate(roots)
        return cls(names, sides, marks, starts, stops, is_nested, roots)

    def begin_likely(self) -> Flags:
        """Return whether each name is likely, or the beginning of a likely one."""
        before = np.concatenate([[0], np.cumsum(self.names.likely)])
        own = np.arange(len(self.starts))
        after = np.maximum(np.searchsorted(self.starts, self.stops), own + 1)
        return before[after] > before[own]

    def cells(self, uncorrected: Integers, numbers: Integers) -> Integers:
        """Find the cell of each name: itself, if it belongs to no shorter one. Leave to each cell
        what belongs to no longer one: ``numbers`` are changed.

        Args:
            uncorrected: [names], marks as the tokenizers show them.
        """
        marks, texts = self.marks, self.names.texts
        cells = self.roots.copy()
        # An unmarked cell contains all that begins with its text.
        searched = np.flatnonzero(self.is_nested & (numbers[self.roots] != UNMARKED))
        outside = self._outside(searched, uncorrected, numbers)
        # Nothing in the shortest cell is in another one, but for names after a longer cell.
        furthest = np.maximum.accumulate(np.where(outside, self.stops[searched], 0))
        searched = searched[outside | (furthest > self.starts[searched])]
        starts, stops = self.starts[searched], self.stops[searched]
        # A name that is part of no other one, nor another of it, takes its text from the root.
        is_separate = np.ones(len(searched), dtype=np.bool_)
        is_separate[1:] = np.maximum.accumulate(stops)[:-1] <= starts[1:]
        is_separate[:-1] &= stops[:-1] <= starts[1:]
        disjoint = searched[is_separate]
        cells[disjoint] = disjoint
        roots, hashes, own = self.roots[disjoint], texts.hashes[disjoint], numbers[disjoint]
        before = numbers[roots]

        def compute(indices: Integers) -> Integers:
            columns = (before[indices].tolist(), texts.strings(disjoint[indices]))
            return np.array(list(map(marks.leaving, *columns, own[indices].tolist())))

        left = marks.left.computed(keys_of(before, hashes, own), compute)
        at = np.flatnonzero(left != before)
        columns = (roots[at].tolist(), hashes[at].tolist(), disjoint[at].tolist(), own[at].tolist())
        for root, hashed, name, its_own in zip(*columns, strict=True):
            text = partial(texts.string, name)
            numbers[root] = marks.left_of(int(numbers[root]), hashed, text, its_own)
        self._select_nested(searched[~is_separate], numbers, cells)
        return cells

    def _outside(self, searched: Integers, uncorrected: Integers, numbers: Integers) -> Flags:
        """Return whether names do not belong to their roots."""
        roots, texts = self.roots[searched], self.names.texts

        def are_outside(own: Integers, names: Integers) -> Flags:
            def strings(indices: Integers) -> list[str]:
                return texts.strings(names[indices])

            return ~self.marks.belong(own, texts.hashes[names], strings)

        result = are_outside(uncorrected[roots], searched)
        # Corrections are about beginnings of a side's text, and only these names are the same; the
        # other marks, unlike these, occur at many boundaries.
        at = np.flatnonzero(uncorrected[roots] != numbers[roots])
        lengths = texts.lengths[roots[at]]
        codes = texts.at(searched[at]).codes_at(lengths)
        same = np.zeros(len(at), dtype=np.bool_)
        for places in (self.sides.student, self.sides.teacher):
            ahead = places.offsets[self.names.boundaries[roots[at]]] + lengths
            same |= places.text.codes.take(ahead, mode="clip") == codes
        at = at[same]
        result[at] = are_outside(numbers[roots[at]], searched[at])
        return result

    def _select_nested(self, searched: Integers, numbers: Integers, cells: Integers) -> None:
        """Find the cells of names that begin with each other, one after another."""
        texts, marks = self.names.texts, self.marks
        shorter: list[_NestedCell] = []  # that the next name may begin with
        root = -1
        hashes = texts.hashes[searched].tolist()
        columns = (searched, self.roots[searched], self.starts[searched], self.stops[searched])
        for hashed, name, its_root, start, stop in zip(
            hashes, *(column.tolist() for column in columns), strict=True
        ):
            if its_root != root:
                root = its_root
                shorter = [_NestedCell(root, int(self.stops[root]), int(numbers[root]))]
            while shorter[-1].stop <= start:
                shorter.pop()
            text = partial(texts.string, name)
            containing = (c.name for c in shorter if marks.contains(c.marks, hashed, text))
            cells[name] = next(containing, name)
            if cells[name] != name:
                continue
            own = int(numbers[name])
            for cell in shorter:
                marked = marks.left_of(cell.marks, hashed, text, own)
                if marked != cell.marks:
                    cell.marks = numbers[cell.name] = marked
            shorter.append(_NestedCell(name, stop, own))


@dataclass(slots=True)
class _NestedCell:
    """A cell that other names begin with."""

    name: int
    stop: int
    marks: int
