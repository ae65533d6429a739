"""``Junction``: which units can be told apart at a boundary that tokens cross.

A token that crosses a boundary says ``w`` and leaves open what comes after ``w``. A longer unit
that begins with ``w``, and that this side would write as that token and more, is therefore counted
where ``w`` is. What a side could only say by ending a token at the boundary first is not counted.

The same few tokens cross thousands of boundaries, so what was found is kept.
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.shared_units import NO_UNIT, Crossings, SharedUnits

#: Junctions that are remembered; beyond, all are forgotten and found anew.
MOST_REMEMBERED = 20_000

#: (first, last exclusive) ranks of units, in order and without overlap.
Ranges = NDArray[np.int64]  # [n, 2]

#: Units, or ids.
Feed = NDArray[np.int64]

#: What crosses a boundary of student and teacher, and whether either's token was cut there.
JunctionKey = tuple[tuple[Crossings, ...], tuple[Crossings, ...], bool, bool]


class Junction:
    """A boundary, by what crosses it; the nearest row's token first."""

    def __init__(self, units: SharedUnits, key: JunctionKey, sayable: Ranges | None) -> None:
        student, teacher, student_cut, teacher_cut = key
        self._units = units
        self._student = student
        self._crossed = (*student, *teacher)
        self._cut = [
            side[0] for side, cut in ((student, student_cut), (teacher, teacher_cut)) if cut
        ]
        self._sayable = sayable
        self._cells: dict[int, int] = {}
        self._members: dict[int, NDArray[np.int64]] = {}

    @cached_property
    def uncertain(self) -> Ranges:
        """Ranks of the units whose cell has to be asked for."""
        if self._sayable is not None:
            return self._sayable
        ranges = np.concatenate([self._units.ranks_said(crossed) for crossed in self._crossed])
        ranges = ranges[np.lexsort((-ranges[:, 1], ranges[:, 0]))]
        # Ranges of what begins alike hold each other or are apart: the widest are enough.
        reached = np.maximum.accumulate(np.concatenate([[0], ranges[:, 1]]))
        return ranges[ranges[:, 0] >= reached[:-1]]

    @cached_property
    def said(self) -> frozenset[int]:
        """Roots of all that tokens say after they have crossed."""
        return frozenset().union(*(crossed.ids_by_unit for crossed in self._crossed))

    @property
    def others_are_cells(self) -> bool:
        """Whether all other units are counted where they are, or else nowhere."""
        return self._sayable is None

    def cell_of(self, unit: int) -> int:
        """See ``cell``, of any unit: most are quickly seen to be certain."""
        rank = self._units.ranks[unit]
        at = int(np.searchsorted(self.uncertain[:, 0], rank, side="right")) - 1
        if at >= 0 and rank < self.uncertain[at, 1]:
            return self.cell(unit)
        return unit if self.others_are_cells else NO_UNIT

    def cell(self, unit: int) -> int:
        """The unit that stands for all that cannot be told from ``unit`` here, or ``NO_UNIT``."""
        found = self._cells.get(unit)
        if found is None:
            found = self._cells[unit] = self._find(unit)
        return found

    def members(self, cell: int) -> NDArray[np.int64]:
        """All units that are counted in a cell."""
        found = self._members.get(cell)
        if found is None:
            longer = self._units.extensions(cell) if cell in self.said else None
            others = [] if longer is None else [u for u in longer.tolist() if self.cell(u) == cell]
            found = self._members[cell] = np.array([cell, *others], dtype=np.int64)
        return found

    def feeds(self, cell: int) -> tuple[Feed, list[tuple[int, Feed]]]:
        """What the student's rows say of a cell: units for the row that starts here, and ids for
        those that start before, each with its number, the nearest row's being 0."""
        members = self.members(cell)
        crossing = [(n, _ids_of(members, crossed)) for n, crossed in enumerate(self._student)]
        return members, [(n, ids) for n, ids in crossing if len(ids)]

    def _find(self, unit: int) -> int:
        texts = self._units.texts
        while unit != NO_UNIT:
            shorter = self._shorter(texts[unit])
            if shorter is None:
                break
            unit = shorter
        if unit == NO_UNIT or (unit in self.said and self._units.extensions(unit) is None):
            return NO_UNIT
        text = texts[unit]
        sayable = all(cut.side.spelling.goes_beyond(cut.before, text) for cut in self._cut)
        return unit if sayable else NO_UNIT

    def _shorter(self, text: str) -> int | None:
        for crossed in self._crossed:
            found = crossed.left_open_by(text)
            if found is not None:
                return found
        return None


class Junctions:
    """All junctions of a pair of vocabularies that have been met."""

    def __init__(self, units: SharedUnits) -> None:
        self.units = units
        self._known: dict[JunctionKey, Junction] = {}

    def at(self, key: JunctionKey) -> Junction:
        """The junction of what crosses a boundary."""
        found = self._known.get(key)
        if found is None:
            if len(self._known) > MOST_REMEMBERED:
                self._known.clear()
            found = self._known[key] = Junction(self.units, key, self._sayable(key))
        return found

    def _sayable(self, key: JunctionKey) -> Ranges | None:
        student, teacher, student_cut, teacher_cut = key
        if not student_cut and not teacher_cut:
            return None
        cut = student[0] if student_cut else teacher[0]
        return self.units.ranks_after(cut.side, cut.before)


def _ids_of(units: Feed, crossings: Crossings) -> Feed:
    """The tokens that cross and say any of these units."""
    by_unit = crossings.ids_by_unit
    said = [by_unit[unit] for unit in units.tolist() if unit in by_unit]
    return np.concatenate([_NO_IDS, *said])


_NO_IDS = np.zeros(0, dtype=np.int64)
