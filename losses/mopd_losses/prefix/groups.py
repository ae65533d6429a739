"""``Groups``: sets of student ids whose probabilities are always summed together."""

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.junctions import Junction
from mopd_losses.prefix.shared_units import Crossings, SharedUnits
from mopd_losses.prefix.targets import WHOLE_ROW

Integers = NDArray[np.int64]

#: The group of the row that starts at a place, and those of rows that start before it, each with
#: the row's number, the nearest being 0.
Feeds = tuple[int, list[tuple[int, int]]]


class Groups:
    """Groups under the numbers that they were given; ``tables`` has the final ones.

    Numbers are ``WHOLE_ROW``, one more than a unit, more than that for several units, and below 0
    for groups of any ids.
    """

    def __init__(self, units: SharedUnits) -> None:
        self._units = units
        self._several: list[Integers] = []  # units
        self._any: list[Integers] = []  # ids
        self._number_of: dict[Hashable, int] = {}
        self._feeds: dict[Junction, dict[int, Feeds]] = {}

    def of_each(self, units: Integers) -> Integers:
        """The ids with a unit for their root: a group for each of the units."""
        return units + (WHOLE_ROW + 1)

    def feeds(self, junction: Junction) -> dict[int, Feeds]:
        """The feeds of cells that are known; ``feeds_of`` adds to them."""
        return self._feeds.setdefault(junction, {})

    def feeds_of(self, junction: Junction, cell: int) -> Feeds:
        """What the student's rows say of a cell."""
        units, crossing = junction.feeds(cell)
        if len(units) == 1:
            own = WHOLE_ROW + 1 + cell
        else:
            own = WHOLE_ROW + 1 + len(self._units.texts) + len(self._several)
            self._several.append(units)
        found = self.feeds(junction)[cell] = own, [(n, self._of_any(ids)) for n, ids in crossing]
        return found

    def of_crossings(self, crossings: Crossings) -> int:
        """All ids that cross."""
        if crossings not in self._number_of:
            self._number_of[crossings] = self._of_any(crossings.ids)
        return self._number_of[crossings]

    def of_text(self, text: str) -> int:
        """The student's ids that spell a string."""
        if text not in self._number_of:
            ids = self._units.student.spelling.ids.get(text, ())
            self._number_of[text] = self._of_any(np.array(ids, dtype=np.int64))
        return self._number_of[text]

    def of_id(self, token_id: int) -> int:
        """One id."""
        if token_id not in self._number_of:
            self._number_of[token_id] = self._of_any(np.array([token_id], dtype=np.int64))
        return self._number_of[token_id]

    def _of_any(self, ids: Integers) -> int:
        self._any.append(ids)
        return -len(self._any)

    def tables(self, groups: Integers) -> tuple[Integers, Integers, Integers]:
        """The groups under their final numbers, where each group's ids begin, and the ids."""
        used = np.zeros(WHOLE_ROW + 1 + len(self._units.texts) + len(self._several), np.bool_)
        used[WHOLE_ROW] = True
        used[groups[groups > 0]] = True
        used[len(used) - len(self._several) :] = True
        number = np.cumsum(used) - 1
        final = np.where(groups < 0, number[-1] - groups, number[np.maximum(groups, 0)])
        single = np.flatnonzero(used[WHOLE_ROW + 1 :][: len(self._units.texts)])
        units = np.concatenate([single, *self._several])
        sizes = np.concatenate([np.ones(len(single), np.int64), _lengths(self._several)])
        starts = self._units.starts[units]
        counts = self._units.starts[units + 1] - starts
        ends = np.cumsum(counts)
        entries = np.arange(counts.sum()) + np.repeat(starts - ends + counts, counts)
        ids = np.concatenate([[-1], self._units.student_ids[entries], *self._any])
        of_units = np.diff(ends[np.cumsum(sizes) - 1], prepend=0)
        lengths = np.concatenate([[0, 1], of_units, _lengths(self._any)])
        return final, np.cumsum(lengths), ids


def _lengths(arrays: list[Integers]) -> Integers:
    return np.array([len(array) for array in arrays], dtype=np.int64)
