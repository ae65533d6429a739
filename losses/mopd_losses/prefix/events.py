"""What a teacher says at every boundary of a completion, as masses of events.

Everything but what crosses a boundary is done for all places at once: an entry is a place, a unit
and a mass in nats, and entries stand in the order of their places. ``prefix_kl`` says what is
compared and why.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.boundaries import NO_ROW, Places, Standing
from mopd_losses.prefix.junctions import Junction
from mopd_losses.prefix.shared_units import NO_UNIT, SharedUnits
from mopd_protocol.topk_logprobs import TopKLogprobs

Integers = NDArray[np.int64]
Nats = NDArray[np.float64]


class Entries(NamedTuple):
    """Masses of units at places, in order of the places."""

    places: Integers  # [n]
    units: Integers  # [n], or NO_UNIT
    nats: Nats  # [n]

    def at(self, where: NDArray[np.bool_] | Integers) -> "Entries":
        """Some of them."""
        return Entries(self.places[where], self.units[where], self.nats[where])


class Events(NamedTuple):
    """A teacher on (events, rest) at each place; the events in order of their places."""

    places: Integers  # [events]
    columns: Integers  # [events], counted from 0 at each place
    cells: Integers  # [events], the unit that each is named after
    nats: Nats  # [events]
    rests: Nats  # [places]
    known: Nats  # [places]: everything that the teacher says; how likely it found the way here


def teacher_events(places: Places, topk: TopKLogprobs, units: SharedUnits) -> Events:
    """The events that a teacher's top-k leads to at every place."""
    entries = _in_cells(_entries(places.teacher, topk), places, units)
    in_rest = entries.units == NO_UNIT
    everything = _logsumexp(entries.nats, entries.places, len(places))
    rests = _logsumexp(entries.nats[in_rest], entries.places[in_rest], len(places))
    not_crossed = np.array([not crossed for crossed in places.teacher.crossed], dtype=np.bool_)
    alone = not_crossed & (places.teacher.own != NO_ROW)
    known = np.where(alone, 0.0, everything)

    named = entries.at(~in_rest)
    keys = named.places * len(units.texts) + named.units
    _, first, event = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)  # of places, and of what is said there
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    event_places = named.places[first[order]]
    starts = np.searchsorted(event_places, np.arange(len(places)))
    return Events(
        event_places,
        np.arange(len(order)) - starts[event_places],
        named.units[first[order]],
        _logsumexp(named.nats, rank[event], len(order)),
        rests,
        known,
    )


def _entries(standing: Standing, topk: TopKLogprobs) -> Entries:
    """All that the teacher says, by the root of each token; the tail and all else as NO_UNIT."""
    own = np.flatnonzero(standing.own != NO_ROW)
    rows = standing.own[own]
    paths = _paths(standing, topk)[own]
    present = topk.logprobs[rows] > -np.inf
    units = standing.written.side.units[np.where(present, topk.ids[rows], 0)]
    parts = [
        Entries(
            np.broadcast_to(own[:, None], present.shape)[present],
            units[present],
            (topk.logprobs[rows] + paths[:, None])[present],
        ),
        Entries(own, np.full(len(own), NO_UNIT), topk.tail_logprobs[rows] + paths),
        _crossed_entries(standing, topk),
    ]
    together = Entries(
        np.concatenate([part.places for part in parts]),
        np.concatenate([part.units for part in parts]),
        np.concatenate([part.nats for part in parts]),
    )
    return together.at(np.argsort(together.places, kind="stable"))


def _paths(standing: Standing, topk: TopKLogprobs) -> Nats:
    """[places], nats of the teacher's tokens from the first open row to the one that starts."""
    found = np.zeros(len(standing.own))
    written = topk.token_logprobs.tolist()
    for place, (crossed, own) in enumerate(
        zip(standing.crossed, standing.own.tolist(), strict=True)
    ):
        if crossed and own != NO_ROW:
            found[place] = math.fsum(written[crossed[-1][0] : own])
    return found


def _crossed_entries(standing: Standing, topk: TopKLogprobs) -> Entries:
    places, units, nats = list[int](), list[int](), list[float]()
    written, ids, logprobs = (x.tolist() for x in (topk.token_logprobs, topk.ids, topk.logprobs))
    rows: dict[int, dict[int, float]] = {}  # id -> nats, of rows that start before a place
    for place, (crossed, cut) in enumerate(
        zip(standing.crossed, standing.cut.tolist(), strict=True)
    ):
        for row, crossings in crossed:
            if row not in rows:
                rows[row] = dict(zip(ids[row], logprobs[row], strict=True))
            masses, path = rows[row], math.fsum(written[crossed[-1][0] : row])
            unit_of = crossings.unit_of
            if row == cut:
                # The token really there is known also outside the top-k.
                masses = {**masses, standing.written.ids[row]: written[row]}
                ending = standing.written.side.spelling.ids.get(crossings.before, ())
                ended = [token for token in ending if token in masses]
                places += [place] * len(ended)
                units += [NO_UNIT] * len(ended)
                nats += [path + masses[token] for token in ended]
            crossing = masses.keys() & unit_of.keys()
            places += [place] * len(crossing)
            units += [unit_of[token] for token in crossing]
            nats += [path + masses[token] for token in crossing]
    return Entries(np.array(places, np.int64), np.array(units, np.int64), np.array(nats))


def _in_cells(entries: Entries, places: Places, units: SharedUnits) -> Entries:
    """The same with every unit replaced by the cell that it is counted in."""
    junctions = [junction for junction in dict.fromkeys(places.junctions) if junction]
    if not junctions:
        return entries
    number = {junction: at for at, junction in enumerate(junctions)}
    at_place = np.array([number.get(j, -1) for j in places.junctions])  # type: ignore[arg-type]
    at = at_place[entries.places]
    asked = (at >= 0) & (entries.units != NO_UNIT)
    uncertain = np.zeros(len(at), dtype=np.bool_)
    uncertain[asked] = _uncertain(junctions, at[asked], units.ranks[entries.units[asked]])
    named = np.array([junction.others_are_cells for junction in junctions])
    cells = np.where(asked & ~uncertain & ~named[at], NO_UNIT, entries.units)
    pairs = at[uncertain] * len(units.texts) + entries.units[uncertain]
    distinct, inverse = np.unique(pairs, return_inverse=True)
    found = [
        junctions[junction].cell(unit)
        for junction, unit in zip(*divmod(distinct, len(units.texts)), strict=True)
    ]
    cells[uncertain] = np.array(found, dtype=np.int64)[inverse]
    return entries._replace(units=cells)


def _uncertain(junctions: list[Junction], at: Integers, ranks: Integers) -> NDArray[np.bool_]:
    """Which (junction, rank of a unit) are in the junction's ranges of uncertain ranks."""
    width = int(ranks.max(initial=0)) + 1
    ranges = [np.minimum(junction.uncertain, width) for junction in junctions]
    bounds = np.concatenate([part + n * width for n, part in enumerate(ranges)])
    bounds = np.concatenate([[[-1, -1]], bounds])
    keys = at * width + ranks
    return keys < bounds[np.searchsorted(bounds[:, 0], keys, side="right") - 1, 1]


def _logsumexp(terms: Nats, segments: Integers, count: int) -> Nats:
    """[count], -inf for a segment without terms; a term by itself is not rounded."""
    peaks = np.full(count, -np.inf)
    np.maximum.at(peaks, segments, terms)
    reached = peaks > -np.inf
    shifts = np.where(reached, peaks, 0.0)
    sums = np.bincount(segments, weights=np.exp(terms - shifts[segments]), minlength=count)
    return np.log(np.where(reached, sums, 1.0)) + peaks
