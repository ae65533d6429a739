"""``Masses``: the teacher's mass of everything that may follow the student's tokens before each
position, and the probabilities that follow from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mopd_losses.translation.first_tokens import ANY, INCOMPATIBLE, NO_TOKEN, UNDECIDED
from mopd_losses.translation.rows import Floats, Integers, expanded

#: Probability by which a named entry may be wrong.
TOLERANCE = 1e-4

#: The tokens of a set, by its number.
Members = Callable[[int], frozenset[int]]

#: Added to tokens in keys, so that none is negative.
_OFFSET = -UNDECIDED


class Undecided(Protocol):
    """Text whose first token is not certain, one text an element."""

    @property
    def positions(self) -> Integers: ...

    @property
    def sets(self) -> Integers:
        """Sets of the tokens that the student may generate first; negative before the position."""
        ...

    @property
    def masses(self) -> Floats: ...


@dataclass(frozen=True, eq=False)
class Probabilities:
    """Probabilities of all positions, one position after another."""

    positions: Integers  # [entries], ascending, and within a position likeliest first
    tokens: Integers  # [entries], as ``events`` have them
    probabilities: Floats  # [entries], above zero
    realised: Floats  # [positions], of text that may begin with the realised token or not, all
    lost: NDArray[np.bool_]  # [positions], text without a name is likelier than each token with one


class Masses:
    """Sums of masses.

    Args:
        events: [positions], the token that stands for the realised one.
        size: of the student's vocabulary.
    """

    def __init__(self, events: Integers, size: int) -> None:
        self._events = events
        self._step = size + _OFFSET
        self.reached: Floats = np.zeros(len(events))
        """[positions], of all text that continues the realised one."""
        self._keys: list[Integers] = []
        self._masses: list[Floats] = []

    def add(self, positions: Integers, tokens: Integers, masses: Floats) -> None:
        """Add mass that is certain to begin with a token, ``INCOMPATIBLE`` or ``NO_TOKEN``."""
        self._keys.append(self._key(positions, tokens))
        self._masses.append(masses)

    def reach(self, positions: Integers, masses: Floats) -> None:
        """Add mass of text that continues the realised one."""
        self.reached += self._summed(positions, masses)

    @property
    def totals(self) -> Floats:
        """[positions], mass of all that may follow the student's tokens."""
        if not self._keys:
            return self.reached
        keys, masses = np.concatenate(self._keys), np.concatenate(self._masses)
        excluded = keys % self._step == INCOMPATIBLE + _OFFSET
        return self.reached - self._summed(keys[excluded] // self._step, masses[excluded])

    def _key(self, positions: Integers, tokens: Integers) -> Integers:
        return positions * self._step + tokens + _OFFSET

    def _summed(self, positions: Integers, masses: Floats) -> Floats:
        summed = np.bincount(positions, masses, minlength=len(self._events))
        return summed.astype(np.float64)  # integers if there are none

    def probabilities(self, undecided: Undecided, members: Members) -> Probabilities:
        """Return the tokens whose error is within the tolerance, and what is known of all.

        Args:
            members: of sets.
        """
        count = len(self._events)
        everywhere = np.arange(count)
        keys = np.concatenate([*self._keys, self._key(everywhere, self._events)])
        masses = np.concatenate([*self._masses, np.zeros(count)])
        keys, which = np.unique(keys, return_inverse=True)
        masses = np.bincount(which, masses, minlength=len(keys)).astype(np.float64)
        positions, tokens = keys // self._step, keys % self._step - _OFFSET
        totals = self.totals
        safe = np.where(totals > 0, totals, 1.0)

        begun = undecided.sets >= 0
        flags = _containing(members, undecided.sets, (INCOMPATIBLE, ANY))
        # Text before the position may have been written with other tokens, by either side.
        unknown = self._summed(*_selected(undecided, flags[0] | ~begun))
        anything = self._summed(*_selected(undecided, flags[1]))
        shared = self._shared(keys, undecided, members)

        shares = masses / safe[positions]
        errors = shared + anything[positions] + shares * unknown[positions]
        certain = (tokens >= 0) & (masses > 0) & (totals[positions] > 0)
        certain &= errors <= TOLERANCE * safe[positions]
        named = np.flatnonzero(certain)
        named = named[np.lexsort((tokens[named], -shares[named], positions[named]))]
        shares = np.minimum(shares, 1.0)

        event = np.searchsorted(keys, self._key(everywhere, self._events))
        realised = np.minimum((masses[event] + shared[event]) / safe, 1.0) * (totals > 0)
        none = tokens == NO_TOKEN
        nameless = self._summed(*_selected(undecided, begun))
        nameless += self._summed(positions[none], masses[none])
        likeliest = np.zeros(count)
        np.maximum.at(likeliest, positions[named], shares[named])
        return Probabilities(
            positions[named], tokens[named], shares[named], realised, nameless > likeliest * totals
        )

    def _shared(self, keys: Integers, undecided: Undecided, members: Members) -> Floats:
        """Return the undecided mass that may begin with each entry's token."""
        used = undecided.sets >= 0
        positions, masses = undecided.positions[used], undecided.masses[used]
        if not len(positions):
            return np.zeros(len(keys))
        numbers, which = np.unique(undecided.sets[used], return_inverse=True)
        sets = [members(number) for number in numbers.tolist()]
        sizes = np.array([*map(len, sets)], dtype=np.int64)
        tokens = np.array([token for each in sets for token in sorted(each)], dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        first, last = np.searchsorted(keys, [positions * self._step, (positions + 1) * self._step])
        is_small = sizes[which] <= last - first
        shared = np.zeros(len(keys))

        small = np.flatnonzero(is_small)
        each, member = expanded(starts[which[small]], sizes[which[small]])
        undecided_keys = self._key(positions[small][each], tokens[member])
        at = np.minimum(np.searchsorted(keys, undecided_keys), len(keys) - 1)
        present = keys[at] == undecided_keys
        shared += np.bincount(at[present], masses[small][each[present]], minlength=len(keys))

        large = np.flatnonzero(~is_small)
        each, at = expanded(first[large], (last - first)[large])
        ordered = np.repeat(np.arange(len(sizes)), sizes) * self._step + tokens + _OFFSET
        undecided_keys = which[large][each] * self._step + keys[at] % self._step
        place = np.minimum(np.searchsorted(ordered, undecided_keys), len(ordered) - 1)
        present = ordered[place] == undecided_keys
        return shared + np.bincount(at[present], masses[large][each[present]], minlength=len(keys))


def _containing(members: Members, sets: Integers, tokens: Sequence[int]) -> list[NDArray[np.bool_]]:
    """Return whether each set has each of the tokens."""
    numbers, which = np.unique(sets, return_inverse=True)
    sets_of = [members(number) if number >= 0 else () for number in numbers.tolist()]
    return [
        np.array([token in each for each in sets_of], dtype=np.bool_)[which] for token in tokens
    ]


def _selected(undecided: Undecided, selected: NDArray[np.bool_]) -> tuple[Integers, Floats]:
    return undecided.positions[selected], undecided.masses[selected]
