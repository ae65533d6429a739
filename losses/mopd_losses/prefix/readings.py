"""Which of the student's log-probabilities feed each event, as readings of groups of its tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.boundaries import NO_ROW, Places
from mopd_losses.prefix.events import Events
from mopd_losses.prefix.groups import Groups
from mopd_losses.prefix.spans import Spans, crossed_behind
from mopd_losses.prefix.targets import NO_PATH, WHOLE_ROW

Integers = NDArray[np.int64]
#: Number of the place or span (``Spans``), column, position, group, path.
Reading = tuple[int, int, int, int, int]


class Paths(NamedTuple):
    """Runs of the student's own tokens, from the first row open at a place up to another."""

    numbers: list[int]  # [paths], of places and spans
    steps: list[tuple[int, int, int]]  # path, position, id


@dataclass(frozen=True, eq=False)
class StudentReadings:
    """Readings of the student for all places of one completion; positions count its tokens."""

    named: Integers  # [n, 5], see ``Reading``: what is summed for each event
    known: Integers  # [n, 5]: what is summed for everything together
    paths: Paths


def student_readings(
    places: Places, spans: Spans, events: Events, groups: Groups
) -> StudentReadings:
    """The readings for a teacher's events and for the spans, under the numbers of both."""
    standing = places.student
    reader = _Reader(places, groups)
    numbers = spans.place_numbers.tolist()
    begin_of = dict(zip(spans.lasts.tolist(), spans.firsts.tolist(), strict=True))
    path_to_own = np.full(len(places), NO_PATH)
    owns, cells = standing.own.tolist(), events.cells.tolist()
    own_groups = groups.of_each(events.cells)
    said, said_groups = list[int](), list[int]()
    starts = np.searchsorted(events.places, np.arange(len(places) + 1)).tolist()
    for place, junction in enumerate(places.junctions):
        number = numbers[place]
        if place in begin_of:
            reader.read_span(number - 1, begin_of[place], place)
        first, last = starts[place], starts[place + 1]
        if junction is None or first == last:
            continue
        crossed = standing.crossed[place]
        path_to = reader.paths_from(number, place, reader.rows_at(place))
        path_to_own[place] = path_to.get(owns[place], NO_PATH)
        columns = dict(zip(cells[first:last], range(last - first), strict=True))
        feeds = groups.feeds(junction)
        for cell in junction.said.intersection(columns):
            column = columns[cell]
            own_group, crossing = feeds.get(cell) or groups.feeds_of(junction, cell)
            said.append(first + column)
            said_groups.append(own_group)
            for nearest, group in crossing:
                row = crossed[nearest][0]
                reader.named.append((number, column, row, group, path_to[row]))
        reader.read_crossed(number, place, path_to)
    own_groups[np.array(said, dtype=np.int64)] = said_groups
    at_own = np.flatnonzero(standing.own[events.places] != NO_ROW)
    at = events.places[at_own]
    here = np.flatnonzero((standing.own != NO_ROW) & (np.diff(starts) > 0))
    return StudentReadings(
        _together(
            reader.named,
            spans.place_numbers[at],
            events.columns[at_own],
            standing.own[at],
            own_groups[at_own],
            path_to_own[at],
        ),
        _together(
            reader.known,
            spans.place_numbers[here],
            np.zeros_like(here),
            standing.own[here],
            np.full_like(here, WHOLE_ROW),
            path_to_own[here],
        ),
        reader.paths,
    )


class _Reader:
    """The readings that are found one by one, in the order of their numbers."""

    def __init__(self, places: Places, groups: Groups) -> None:
        self.named = list[Reading]()
        self.known = list[Reading]()
        self.paths = Paths([], [])
        self._standing = places.student
        self._groups = groups

    def rows_at(self, place: int) -> list[int]:
        """The rows that are open at a place, but for one that is only cut."""
        own = int(self._standing.own[place])
        rows = [row for row, _ in reversed(self._standing.crossed[place])]
        return rows if own == NO_ROW else [*rows, own]

    def paths_from(self, number: int, place: int, rows: Iterable[int]) -> dict[int, int]:
        """New paths from the first row that is open at a place: row -> path."""
        first = self.rows_at(place)[0]
        return {row: self._path(number, first, row) for row in rows}

    def read_crossed(self, number: int, place: int, path_to: dict[int, int]) -> None:
        """Everything that rows that start before a place say there."""
        cut = self._standing.cut[place]
        for row, crossings in self._standing.crossed[place]:
            path = path_to[row]
            self.known.append((number, 0, row, self._groups.of_crossings(crossings), path))
            if row == cut:
                self.known.append((number, 0, row, self._groups.of_text(crossings.before), path))

    def read_span(self, number: int, first: int, last: int) -> None:
        """A span, and everything that is said where it begins."""
        standing = self._standing
        own, end = int(standing.own[first]), int(standing.own[last]) - 1
        behind = crossed_behind(standing, first, last)
        rows = {*self.rows_at(first), *(row for row, _ in behind), end}
        path_to = self.paths_from(number, first, sorted(rows))
        way = self._groups.of_id(standing.written.ids[end])
        self.named.append((number, 0, end, way, path_to[end]))
        for row, crossed in behind:
            group = self._groups.of_crossings(crossed)
            self.named.append((number, 0, row, group, path_to[row]))
        self.known.append((number, 0, own, WHOLE_ROW, path_to[own]))
        self.read_crossed(number, first, path_to)

    def _path(self, number: int, first: int, row: int) -> int:
        if row == first:
            return NO_PATH
        path = len(self.paths.numbers)
        self.paths.numbers.append(number)
        written = self._standing.written.ids
        self.paths.steps.extend(
            (path, position, written[position]) for position in range(first, row)
        )
        return path


def _together(some: list[Reading], *others: Integers) -> Integers:
    """Readings one by one and as columns, in the order of their numbers."""
    rows = np.concatenate([np.stack(others, axis=1), np.array(some, np.int64).reshape(-1, 5)])
    return rows[np.argsort(rows[:, 0], kind="stable")]
