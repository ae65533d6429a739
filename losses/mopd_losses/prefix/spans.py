"""``Spans``: where a root says less than what was written, the span that was written is an event.

A token counts for its root, and what follows the root is compared at the boundary behind it. Where
neither side has a boundary there (the student's ``_koala`` and the teacher's ``_ko|ala`` have the
root ``_``), nobody would ask what follows: every later row is read given that it followed. So the
way to the next boundary of both sides is compared as a whole: how likely is it that the text goes
on with these bytes, and that one of the two has a boundary behind them?

    X(span | o) = sum over rows r open at its end of path(r) * what r says across the end
                  / everything that X says after o

It has everything that the place at its end has, seen from the place where it begins, and is exact
where both are. A side's own tokens are most of it, and their probabilities are known wherever they
stand in a top-k. (The likelihoods of such spans are what ALM compares everywhere, arXiv 2503.20083;
here they only stand in where units do not suffice.)
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.boundaries import NO_ROW, Places, Standing
from mopd_losses.prefix.junctions import Junction
from mopd_losses.prefix.shared_units import NO_UNIT, Crossings, SharedUnits
from mopd_protocol.topk_logprobs import TopKLogprobs

Integers = NDArray[np.int64]
Nats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Spans:
    """Spans of one completion, in order, and the order of places and spans together.

    A span stands before the place at its end.
    """

    firsts: Integers  # [spans], the place where each begins
    lasts: Integers  # [spans], the next place at which both sides have a boundary
    place_numbers: Integers  # [places]
    numbers: Integers  # [spans]

    def __len__(self) -> int:
        return len(self.firsts)


class SpanMasses(NamedTuple):
    """A teacher on (the span, everything else) for each span, in nats."""

    nats: Nats
    rests: Nats


def spans_of(places: Places, units: SharedUnits) -> Spans:
    """The spans whose beginning no unit tells as far as the next boundary of either side."""
    sides = (places.student, places.teacher)
    common = np.flatnonzero(np.logical_and.reduce([side.own != NO_ROW for side in sides]))
    # A control token is not read as a part of a text.
    controls = [np.cumsum(np.append(0, ~side.written.spells))[side.own[common]] for side in sides]
    of_text = np.logical_and.reduce([np.diff(count) == 0 for count in controls])
    firsts, lasts = common[:-1][of_text], common[1:][of_text]
    written = np.array(places.student.written.ids, dtype=np.int64)[places.student.own[firsts]]
    begun = places.student.written.side.units[written].tolist()
    told = [
        _told(unit, places.junctions[first], units)
        for unit, first in zip(begun, firsts.tolist(), strict=True)
    ]
    untold = np.array(told, dtype=np.int64) < places.at[firsts + 1] - places.at[firsts]
    firsts, lasts = firsts[untold], lasts[untold]
    ending = np.zeros(len(places), dtype=np.int64)
    ending[lasts] = 1
    place_numbers = np.arange(len(places)) + np.cumsum(ending)
    return Spans(firsts, lasts, place_numbers, place_numbers[lasts] - 1)


def _told(unit: int, junction: Junction | None, units: SharedUnits) -> int:
    """How many bytes of what was written are told by where it is counted."""
    if junction is not None and unit != NO_UNIT:
        unit = junction.cell_of(unit)
    return 0 if unit == NO_UNIT else len(units.texts[unit])


def crossed_behind(standing: Standing, first: int, last: int) -> list[tuple[int, Crossings]]:
    """Rows, with the tokens that say the span from place ``first`` to ``last`` and end or go on
    behind it; without the side's own way there.

    Tokens of rows that start before the span have to cross its beginning too.
    """
    begin = int(standing.own[first])
    found = [(row, crossed) for row, crossed in standing.crossed[last] if row >= begin]
    earlier = dict(standing.crossed[last][len(found) :])
    symbols, starts = standing.written.symbols, standing.written.starts
    said = symbols[starts[begin] : starts[standing.own[last]]]
    for row, crossed in standing.crossed[first]:
        through = crossed.saying(said, earlier.get(row))
        if through:
            found.append((row, through))
    return found


def span_masses(places: Places, spans: Spans, topk: TopKLogprobs, known: Nats) -> SpanMasses:
    """The teacher's opinions.

    Args:
        known: [places], nats of everything that the teacher says at a place.
    """
    standing = places.teacher
    written = topk.token_logprobs.tolist()
    nats = np.empty(len(spans))
    for span, (first, last) in enumerate(
        zip(spans.firsts.tolist(), spans.lasts.tolist(), strict=True)
    ):
        earlier = standing.crossed[first]
        start = earlier[-1][0] if earlier else int(standing.own[first])
        terms = [math.fsum(written[start : standing.own[last]])]
        for row, crossed in crossed_behind(standing, first, last):
            path = math.fsum(written[start:row])
            crossing = np.isin(topk.ids[row], crossed.ids)
            terms += (path + topk.logprobs[row][crossing].astype(np.float64)).tolist()
        nats[span] = np.logaddexp.reduce(terms)
    all_known = known[spans.firsts]
    found = nats > -np.inf  # else the teacher may know nothing here at all
    shares = np.minimum(nats - np.where(found, all_known, 0.0), 0.0)
    with np.errstate(divide="ignore"):
        return SpanMasses(nats, all_known + np.log(-np.expm1(shares)))
