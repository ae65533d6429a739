"""Marks of cells: longer texts that a cell contains or not, and their numbers.

The same marks occur at many boundaries, so boundaries have numbers of them, and what depends on
marks and a text is computed once.
"""

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.vocabulary.hashed_strings import (
    Hashes,
    Integers,
    keys_of,
    string_hashes,
)
from mopd_losses.prefix.vocabulary.key_table import KeyTable

#: Texts longer than a cell's, in order, and whether they belong to the cell: the longest one with
#: which a string begins decides.
Marks = tuple[tuple[str, bool], ...]

#: Marks, and what is derived of them, kept in memory.
_MOST_MARKS, _CACHED = 200_000, 1_000_000

#: Between the hashed parts of marks: in no text of a token.
_BETWEEN = "\ue000"

#: The number of no marks.
UNMARKED = 0


class _Numbered:
    """Marks with what is looked up in them."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    @cached_property
    def by_length(self) -> list[tuple[int, dict[str, bool]]]:
        """The lengths of texts, longest first, with the texts and whether they belong."""
        texts: dict[int, dict[str, bool]] = {}
        for text, belongs in self.marks:
            texts.setdefault(len(text), {})[text] = belongs
        return sorted(texts.items(), reverse=True)

    @cached_property
    def hash(self) -> np.uint64:
        """A hash that is the same in every run."""
        parts = (part for text, belongs in self.marks for part in (text, str(int(belongs))))
        return string_hashes([_BETWEEN.join(parts)])[0]

    @cached_property
    def excluded(self) -> tuple[str, ...]:
        """Texts that do not belong to the cell."""
        return tuple(text for text, belongs in self.marks if not belongs)


class MarksTable:
    """Numbers of marks."""

    def __init__(self) -> None:
        self.clear()

    @property
    def is_full(self) -> bool:
        """True if the table is to be cleared, with everything that has its numbers."""
        derived = len(self._derived) + len(self._belongs) + len(self.left) + len(self.excluded)
        return len(self) > _MOST_MARKS or derived > _CACHED

    def clear(self) -> None:
        """Remove all marks; other marks get their numbers."""
        self._numbered = [_Numbered(())]
        self._numbers: dict[Marks, int] = {(): UNMARKED}
        self.members = KeyTable(_CACHED)
        """Marks and a text -> whether it belongs to the cell."""
        self.excluded = KeyTable(_CACHED)
        """Marks, a longer text and its cell's marks -> the number of ``without``."""
        self.left = KeyTable(_CACHED)
        """Marks, a longer cell's text and its marks -> the number of ``leaving``."""
        self._derived: dict[tuple[int, int, int], int] = {}
        self._belongs: dict[tuple[int, int], bool] = {}

    def __len__(self) -> int:
        return len(self._numbered)

    def number_of(self, marks: Marks) -> int:
        """Return the number of marks."""
        number = self._numbers.get(marks)
        if number is None:
            number = self._numbers[marks] = len(self._numbered)
            self._numbered.append(_Numbered(marks))
        return number

    def marks_of(self, number: int) -> Marks:
        """Return the marks with a number."""
        return self._numbered[number].marks

    def hashes(self, numbers: Integers) -> Hashes:
        """Hash marks: their numbers are others in another run."""
        known, at = np.unique(numbers, return_inverse=True)
        hashes = [self._numbered[number].hash for number in known.tolist()]
        return np.array(hashes, dtype=np.uint64)[at]

    def belongs(self, number: int, string: str) -> bool:
        """Return whether a string that begins with a cell's text belongs to the cell."""
        for length, texts in self._numbered[number].by_length:
            belongs = texts.get(string[:length])
            if belongs is not None:
                return belongs
        return True

    def belong(
        self, numbers: Integers, hashes: Hashes, strings: Callable[[Integers], list[str]]
    ) -> NDArray[np.bool_]:
        """``belongs``, of several cells and strings.

        Args:
            numbers: [strings], marks.
            strings: indices -> their strings.
        """

        def compute(indices: Integers) -> Integers:
            columns = (numbers[indices].tolist(), strings(indices))
            return np.array(list(map(self.belongs, *columns)))

        return self.members.computed(keys_of(numbers, hashes), compute) == 1

    def contains(self, number: int, hashed: int, string: Callable[[], str]) -> bool:
        """``belongs``, of a string with this hash."""
        known = self._belongs.get((number, hashed))
        if known is None:
            known = self._belongs[number, hashed] = self.belongs(number, string())
        return known

    def as_sampled(self, number: int, token: str) -> int:
        """Correct a mark by the sampled token, which shows better than any trial what belongs: the
        longest one that it begins with. A shorter one is about another token.

        Args:
            token: after the boundary.
        """
        if not token.startswith(self._numbered[number].excluded):
            return number
        marks = dict(self.marks_of(number))
        marks[max((text for text in marks if token.startswith(text)), key=len)] = True
        return self.number_of(tuple(marks.items()))

    def without(self, number: int, longer: str, own: int) -> int:
        """Exclude a longer cell from the cell; what the longer one excludes is where it was.

        Args:
            longer: the text of the longer cell.
            own: the longer cell's marks.
        """
        left = {t: not belongs and self.belongs(number, t) for t, belongs in self.marks_of(own)}
        marks = {**dict(self.marks_of(number)), **left, longer: False}
        return self.number_of(tuple(sorted(marks.items())))

    def with_mark(self, number: int, longer: str, belongs: bool) -> int:
        """Add a longer text to the cell, or exclude it."""
        marks = {**dict(self.marks_of(number)), longer: belongs}
        return self.number_of(tuple(sorted(marks.items())))

    def leaving(self, number: int, text: str, own: int) -> int:
        """Exclude from a shorter cell what belongs to a longer one, too.

        Args:
            number: the shorter cell's marks.
            text: of the longer cell.
            own: the longer cell's marks.
        """
        marks = self.marks_of(number)
        both = {t for t, belongs in marks if belongs and t.startswith(text)}
        both = {t for t in both if self.belongs(own, t)}
        return self.number_of(tuple((t, b and t not in both) for t, b in marks)) if both else number

    def left_of(self, number: int, hashed: int, cell: Callable[[], str], own: int) -> int:
        """``leaving``, of a text with this hash."""
        known = self._derived.get((number, hashed, own))
        if known is None:
            known = self._derived[number, hashed, own] = self.leaving(number, cell(), own)
        return known
