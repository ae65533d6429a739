"""Which of the student's log-probabilities feed each event, as readings of groups of its tokens."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix_events import Events
from mopd_losses.prefix_groups import Groups
from mopd_losses.prefix_places import NO_ROW, Places
from mopd_losses.prefix_targets import NO_PATH, WHOLE_ROW

Integers = NDArray[np.int64]
#: Place, column, slot, group, path.
Reading = tuple[int, int, int, int, int]


class Paths(NamedTuple):
    """Runs of the student's own tokens, from the first row open at a place up to another."""

    places: list[int]  # [paths]
    steps: list[tuple[int, int, int]]  # path, slot, id


@dataclass(frozen=True, eq=False)
class StudentReadings:
    """What is read of the student for all places of one completion; slots count its own tokens."""

    named: Integers  # [n, 5], see ``Reading``: what is summed for each event
    known: Integers  # [n, 5]: what is summed for everything together
    paths: Paths


def student_readings(places: Places, events: Events, groups: Groups) -> StudentReadings:
    """The readings for a teacher's events."""
    standing = places.student
    paths = Paths([], [])
    path_to_own = np.full(len(places), NO_PATH)
    named, known = list[Reading](), list[Reading]()
    owns, cuts, cells = standing.own.tolist(), standing.cut.tolist(), events.cells.tolist()
    own_groups = groups.of_each(events.cells)
    said, said_groups = list[int](), list[int]()
    starts = np.searchsorted(events.places, np.arange(len(places) + 1)).tolist()
    for place, junction in enumerate(places.junctions):
        first, last = starts[place], starts[place + 1]
        if junction is None or first == last:
            continue
        crossed = standing.crossed[place]
        own, cut = owns[place], cuts[place]
        rows = [row for row, _ in reversed(crossed)]
        rows += [own] if own != NO_ROW else []
        path_to = {row: _path(paths, places, place, rows[0], row) for row in rows}
        path_to_own[place] = path_to.get(own, NO_PATH)
        columns = dict(zip(cells[first:last], range(last - first), strict=True))
        feeds = groups.feeds(junction)
        for cell in junction.said.intersection(columns):
            column = columns[cell]
            own_group, crossing = feeds.get(cell) or groups.feeds_of(junction, cell)
            said.append(first + column)
            said_groups.append(own_group)
            for number, group in crossing:
                row = crossed[number][0]
                named.append((place, column, row, group, path_to[row]))
        for row, crossings in crossed:
            known.append((place, 0, row, groups.of_crossings(crossings), path_to[row]))
            if row == cut:
                known.append((place, 0, row, groups.of_text(crossings.before), path_to[row]))
    own_groups[np.array(said, dtype=np.int64)] = said_groups
    at_own = np.flatnonzero(standing.own[events.places] != NO_ROW)
    at = events.places[at_own]
    here = np.flatnonzero((standing.own != NO_ROW) & (np.diff(starts) > 0))
    return StudentReadings(
        _together(
            named, at, events.columns[at_own], standing.own[at], own_groups[at_own], path_to_own[at]
        ),
        _together(
            known,
            here,
            np.zeros_like(here),
            standing.own[here],
            np.full_like(here, WHOLE_ROW),
            path_to_own[here],
        ),
        paths,
    )


def _path(paths: Paths, places: Places, place: int, first: int, row: int) -> int:
    """A new path over the student's tokens from one row up to another."""
    if row == first:
        return NO_PATH
    written = places.student.written.ids
    number = len(paths.places)
    paths.places.append(place)
    paths.steps.extend((number, slot, written[slot]) for slot in range(first, row))
    return number


def _together(some: list[Reading], *others: Integers) -> Integers:
    """Readings one by one and as columns, in the order of their places."""
    rows = np.concatenate([np.stack(others, axis=1), np.array(some, np.int64).reshape(-1, 5)])
    return rows[np.argsort(rows[:, 0], kind="stable")]
