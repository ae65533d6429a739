"""The preparation of prefix KL: everything that depends on text, on the CPU, without the student.

``prefix_kl`` says what is compared and why. In order: ``prefix_places`` finds the boundaries and
the rows that are open there, ``prefix_junctions`` what can be told apart where tokens cross them,
``prefix_events`` sums the teacher's masses, ``prefix_spans`` adds what units do not tell, and
``prefix_readings`` lists what is read of the student. ``shared_units`` has what both can name.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopd_losses.core.loss import AlignedPair
from mopd_losses.prefix.boundaries import Places, places_of
from mopd_losses.prefix.events import Events, teacher_events
from mopd_losses.prefix.groups import Groups
from mopd_losses.prefix.junctions import Junctions
from mopd_losses.prefix.readings import StudentReadings, student_readings
from mopd_losses.prefix.spans import SpanMasses, Spans, span_masses, spans_of
from mopd_losses.prefix.targets import NO_PATH, PrefixTargets, Readings


def prefix_targets(
    comparisons: Sequence[AlignedPair],
    offsets: Sequence[int],
    junctions: Junctions,
    *,
    mass_floor: float,
) -> PrefixTargets:
    """The targets of several completions.

    Args:
        mass_floor: a boundary that the teacher found the way to with less than this weighs less.
    """
    groups = Groups(junctions.units)
    columns = _Columns()
    width = max((comparison.score.topk.k for comparison in comparisons), default=0)
    for comparison, offset in zip(comparisons, offsets, strict=True):
        places = places_of(comparison.student, comparison.score.completion, junctions)
        events = teacher_events(places, comparison.score.topk, junctions.units)
        spans = spans_of(places, junctions.units)
        masses = span_masses(places, spans, comparison.score.topk, events.known)
        read = student_readings(places, spans, events, groups)
        columns.add(places, events, spans, masses, read, offset)
    return columns.targets(groups, width, mass_floor)


class _Columns:
    """The columns of ``PrefixTargets``, growing by one completion after the other."""

    def __init__(self) -> None:
        self._positions = [_NONE]
        self._first_positions = [_NONE]
        self._are_spans = [np.zeros(0, dtype=np.bool_)]
        self._event_places = [_NONE]
        self._event_columns = [_NONE]
        self._event_nats = [_NO_NATS]
        self._rests = [_NO_NATS]
        self._path_masses = [_NO_NATS]
        self._named = [_NO_READINGS]
        self._known = [_NO_READINGS]
        self._path_places = [_NONE]
        self._steps = [_NO_STEPS]
        self._places = 0
        self._paths = 0

    def add(
        self,
        places: Places,
        events: Events,
        spans: Spans,
        masses: SpanMasses,
        read: StudentReadings,
        offset: int,
    ) -> None:
        """One completion whose positions stand after ``offset`` others."""

        def in_order(of_places: NDArray[Any], of_spans: NDArray[Any]) -> NDArray[Any]:
            found = np.empty(len(places) + len(spans), dtype=of_places.dtype)
            found[spans.place_numbers], found[spans.numbers] = of_places, of_spans
            return found[kept]

        # What compares nothing is no place.
        kept = np.union1d(spans.place_numbers[events.places], spans.numbers)
        number = np.zeros(len(places) + len(spans), dtype=np.int64)
        number[kept] = self._places + np.arange(len(kept))
        student, firsts = places.student, places.student.first
        ends = student.own[spans.lasts] - 1
        self._positions.append(in_order(student.here, ends) + offset)
        self._first_positions.append(in_order(firsts, firsts[spans.firsts]) + offset)
        self._are_spans.append(in_order(np.zeros(len(places), bool), np.ones(len(spans), bool)))
        self._event_places += [number[spans.place_numbers[events.places]], number[spans.numbers]]
        self._event_columns += [events.columns, np.zeros(len(spans), dtype=np.int64)]
        self._event_nats += [events.nats, masses.nats]
        self._rests.append(in_order(events.rests, masses.rests))
        path_masses = np.minimum(1.0, np.exp(events.known))
        self._path_masses.append(in_order(path_masses, path_masses[spans.firsts]))
        self._named.append(self._moved(read.named, number, offset))
        self._known.append(self._moved(read.known, number, offset))
        self._path_places.append(number[np.array(read.paths.numbers, dtype=np.int64)])
        steps = np.array(read.paths.steps, dtype=np.int64).reshape(-1, 3)
        self._steps.append(steps + np.array([self._paths, offset, 0]))
        self._places += len(kept)
        self._paths += len(read.paths.numbers)

    def targets(self, groups: Groups, width: int, mass_floor: float) -> PrefixTargets:
        """All completions together.

        Args:
            width: least number of event columns.
        """
        named, known = np.concatenate(self._named), np.concatenate(self._known)
        together, starts, ids = groups.tables(np.concatenate([named[:, 3], known[:, 3]]))
        named[:, 3], known[:, 3] = np.split(together, [len(named)])
        masses = np.concatenate(self._path_masses)
        steps = np.concatenate(self._steps)
        return PrefixTargets(
            positions=torch.tensor(np.concatenate(self._positions)),
            first_positions=torch.tensor(np.concatenate(self._first_positions)),
            are_spans=torch.tensor(np.concatenate(self._are_spans)),
            events=self._events(width),
            rests=torch.tensor(np.concatenate(self._rests)),
            path_masses=torch.tensor(masses),
            weights=torch.tensor(
                np.minimum(1.0, masses / mass_floor) if mass_floor else np.ones_like(masses)
            ),
            named=_readings(named),
            known=_readings(known),
            path_places=torch.tensor(np.concatenate(self._path_places)),
            step_paths=torch.tensor(steps[:, 0]),
            step_positions=torch.tensor(steps[:, 1]),
            step_ids=torch.tensor(steps[:, 2]),
            group_starts=torch.tensor(starts),
            group_ids=torch.tensor(ids),
        )

    def _events(self, width: int) -> Tensor:
        columns = np.concatenate(self._event_columns)
        shape = (self._places, max(width, int(columns.max(initial=-1)) + 1))
        events = torch.full(shape, -torch.inf, dtype=torch.float64)
        nats = torch.tensor(np.concatenate(self._event_nats))
        events[np.concatenate(self._event_places), columns] = nats
        return events

    def _moved(
        self, readings: NDArray[np.int64], number: NDArray[np.int64], offset: int
    ) -> NDArray[np.int64]:
        """With all places, positions and paths counted on from the completions before."""
        moved = readings + np.array([0, 0, offset, 0, self._paths])
        moved[:, 0] = number[readings[:, 0]]
        moved[readings[:, 4] == NO_PATH, 4] = NO_PATH
        return moved


def _readings(rows: NDArray[np.int64]) -> Readings:
    return Readings(*torch.tensor(rows).T.contiguous())


_NONE = np.zeros(0, dtype=np.int64)
_NO_NATS = np.zeros(0)
_NO_READINGS = np.zeros((0, 5), dtype=np.int64)
_NO_STEPS = np.zeros((0, 3), dtype=np.int64)
