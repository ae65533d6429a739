"""``SharedUnits``: what two vocabularies can both name, and which tokens reach past it.

A unit is a token of both vocabularies (the same bytes), or a control token of one role or name.
Every other token begins with a unit, its *root*: the first piece of it in the other side's
spelling, that piece's first piece in the first side's, and so on until a token of both.

A token *crosses* ``u`` when the other side spells it with a boundary after ``u``: it has said what
follows ``u`` at a place where the other side is yet to decide. Where the token begins inside one of
the other side's, how that side spells it depends on what it began with, the *context*.

Strings are bytes as Latin-1 characters (``spelling``). Everything is found when it is first asked
for, but for the roots of both vocabularies.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.spelling import Spelling
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable

#: No unit: what is not named by both sides is in the rest.
NO_UNIT = -1

#: Most student ids with one root, for it to be named: single bytes begin too many.
MOST_IDS = 1024

#: Most units that may begin with what a crossing token says, for each to be looked at; beyond, all
#: of them are left in the rest.
MOST_EXTENSIONS = 1024

#: Most tokens that are spelt anew in a context; beyond, they are spelt as if there were none.
MOST_IN_CONTEXT = 64

#: Texts with a context that are remembered; beyond, all are forgotten and found anew.
MOST_REMEMBERED = 100_000

_LAST_CHARACTER = "\U0010ffff"


class Crossings:
    """The tokens of one side that cross a text."""

    def __init__(self, side: "SideUnits", before: str, said: Mapping[int, tuple[str, int]]) -> None:
        self.side = side
        self.before = before  # what is crossed
        self._told = said
        self.unit_of = {
            token_id: unit for token_id, (_, unit) in said.items()
        }  # root of what is said
        self.root_of = dict(said.values())  # what they spell after the text -> its root
        self.ranges: NDArray[np.int64] | None = None  # see ``SharedUnits.ranks_said``

    def __bool__(self) -> bool:
        return bool(self.unit_of)

    def and_also(self, token_id: int, said: str, root: int) -> "Crossings":
        """These and one token more."""
        return Crossings(self.side, self.before, {**self._told, token_id: (said, root)})

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """All ids that cross the text."""
        return np.fromiter(self.unit_of, dtype=np.int64, count=len(self.unit_of))

    @cached_property
    def ids_by_unit(self) -> dict[int, NDArray[np.int64]]:
        """Root of what is said -> ids."""
        units = np.fromiter(self.unit_of.values(), dtype=np.int64, count=len(self.unit_of))
        order = np.argsort(units, kind="stable")
        found, starts = np.unique(units[order], return_index=True)
        parts = np.split(self.ids[order], starts[1:])
        return dict(zip(found.tolist(), parts, strict=True))

    def saying(self, text: str, others: "Crossings | None") -> "Crossings":
        """Those of these that say ``text`` and no more, or are among the others."""
        among = others.unit_of if others else {}
        kept = {i: told for i, told in self._told.items() if told[0] == text or i in among}
        return Crossings(self.side, self.before + text, kept)

    def left_open_by(self, text: str) -> int | None:
        """The root of what a token says of which ``text`` is the longer, if this side writes it so;
        None where no token does."""
        said = self.root_of
        if not any(text[:end] in said for end in range(1, len(text))):
            return None
        end = self.side.spelling.first_end(self.before + text) - len(self.before)
        return said.get(text[:end]) if 0 < end < len(text) else None


class SideUnits:
    """One vocabulary, seen through what the other side can name too."""

    def __init__(self, table: TokenTable, spelling: Spelling) -> None:
        self.table = table
        self.spelling = spelling
        self.units = np.full(table.size, NO_UNIT, dtype=np.int64)  # root of each id
        self.remainders: dict[str, dict[int, str]] = {}  # what is crossed -> id -> what is said
        self.crossings: dict[tuple[str, str, int], Crossings] = {}  # see ``SharedUnits.crossings``
        self.ranges_after: dict[str, NDArray[np.int64]] = {}  # see ``SharedUnits.ranks_after``
        self.ordered = sorted(spelling.ids)
        #: All strings that some token is longer than.
        self.beginnings = {token[:end] for token in spelling.ids for end in range(1, len(token))}


class SharedUnits:
    """Both vocabularies of one pair, prepared once; what is asked later is remembered.

    For one tokenizer on both sides every id is its own unit and no token crosses anything.
    """

    def __init__(
        self,
        student: TokenTable,
        student_encoder: TextEncoder,
        teacher: TokenTable,
        teacher_encoder: TextEncoder,
    ) -> None:
        self.student = SideUnits(student, Spelling(student, student_encoder))
        self.teacher = SideUnits(teacher, Spelling(teacher, teacher_encoder))
        self.same = student.fingerprint == teacher.fingerprint
        self._roots: dict[str, int] = {}
        self._wide: set[int] = set()
        if self.same:
            self._name_every_id()
        else:
            self._name_shared()
        self._ordered = sorted(self._unit_of)
        self._by_rank = np.array([self._unit_of[text] for text in self._ordered], dtype=np.int64)
        rank_of = {text: rank for rank, text in enumerate(self._ordered)}
        #: [units], the place among the texts of all units; after all of them for control tokens.
        self.ranks = np.array([rank_of.get(t, len(rank_of)) for t in self.texts], dtype=np.int64)
        # The student's ids by root, in the form that events gather from.
        rooted = np.flatnonzero(self.student.units != NO_UNIT)
        self.student_ids = rooted[np.argsort(self.student.units[rooted], kind="stable")]
        counts = np.bincount(self.student.units[rooted], minlength=len(self.texts))
        self.starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(counts)])  # [units + 1]
        self._wide = {int(unit) for unit in np.flatnonzero(counts > MOST_IDS)}
        self.teacher.units[np.isin(self.teacher.units, sorted(self._wide))] = NO_UNIT

    @property
    def sides(self) -> tuple[SideUnits, SideUnits]:
        """Student, teacher."""
        return self.student, self.teacher

    def roots(self, texts: Collection[str]) -> dict[str, int]:
        """The unit that each text begins with, or ``NO_UNIT``."""
        now = {text: text for text in texts if text not in self._roots}
        open_ = [text for text in now if text not in self._unit_of]
        while open_:
            lengths = {text: len(now[text]) for text in open_}
            for side in self.sides:
                side.spelling.learn([now[text] for text in open_])
                for text in open_:
                    pieces = side.spelling.pieces(now[text])
                    now[text] = pieces[0] if pieces else ""
            open_ = [
                text
                for text in open_
                if now[text] not in self._unit_of and 0 < len(now[text]) < lengths[text]
            ]
        self._roots.update((text, self._unit_of.get(unit, NO_UNIT)) for text, unit in now.items())
        found = {text: self._roots[text] for text in texts}
        return {t: NO_UNIT if unit in self._wide else unit for t, unit in found.items()}

    def crossings(
        self, side: SideUnits, before: str, context: str, written: int | None = None
    ) -> Crossings:
        """Tokens of ``side`` that cross ``before``.

        Args:
            context: what the other side's token has spelt before they begin; empty where the other
                side has a boundary there.
            written: the token that does, however it is spelt by itself: in the text it is cut here.
        """
        key = (context, before, NO_UNIT if written is None else written)
        found = side.crossings.get(key)
        if found is None:
            if len(side.crossings) > MOST_REMEMBERED:
                side.crossings.clear()
            found = side.crossings[key] = self._find_crossings(side, before, context, written)
        return found

    def extensions(self, unit: int) -> NDArray[np.int64] | None:
        """Longer units that begin with this one; None where they are too many."""
        first, last = self._range_of_longer(self.texts[unit])
        return self._by_rank[first:last] if last - first <= MOST_EXTENSIONS else None

    def ranks_beginning_with(self, text: str) -> tuple[int, int]:
        """First and last (exclusive) of the units, in order of their texts, that begin so."""
        first = bisect_left(self._ordered, text)
        return first, bisect_left(self._ordered, text + _LAST_CHARACTER, lo=first)

    def ranks_said(self, crossings: Crossings) -> NDArray[np.int64]:
        """[n, 2], ranges of ranks of all that begins with what is said by tokens that cross, and of
        what that is counted as."""
        if crossings.ranges is None:
            roots = np.array([*crossings.ids_by_unit], dtype=np.int64)
            ranks = self.ranks[roots[roots != NO_UNIT]][:, None]
            ranges = self._ranges(sorted(crossings.root_of))
            crossings.ranges = np.concatenate([ranges, ranks + np.arange(2)])
        return crossings.ranges

    def ranks_after(self, side: SideUnits, before: str) -> NDArray[np.int64]:
        """[n, 2], ranges of ranks of all that begins with the rest of a token after ``before``."""
        if before not in side.ranges_after:
            if len(side.ranges_after) > MOST_REMEMBERED:
                side.ranges_after.clear()
            longer = _beginning_with(side.ordered, before)
            side.ranges_after[before] = self._ranges([token[len(before) :] for token in longer])
        return side.ranges_after[before]

    def _ranges(self, ordered: Sequence[str]) -> NDArray[np.int64]:
        found: list[tuple[int, int]] = []
        shortest: str | None = None
        for text in ordered:
            if shortest is None or not text.startswith(shortest):
                shortest = text
                found.append(self.ranks_beginning_with(text))
        ranges = np.array(found, dtype=np.int64).reshape(-1, 2)
        return ranges[ranges[:, 0] < ranges[:, 1]]

    def _range_of_longer(self, text: str) -> tuple[int, int]:
        first, last = self.ranks_beginning_with(text)
        return first + (first < last and self._ordered[first] == text), last

    def _find_crossings(
        self, side: SideUnits, before: str, context: str, written: int | None
    ) -> Crossings:
        if written is not None:
            found = self.crossings(side, before, context)
            if written in found.unit_of:
                return found
            said = side.spelling.tokens[written][len(before) :]
            return found.and_also(written, said, self.roots([said])[said])
        remainders = {} if self.same else self._remainders(side, before, context)
        roots = self.roots({*remainders.values()})
        return Crossings(side, before, {i: (said, roots[said]) for i, said in remainders.items()})

    def _name_every_id(self) -> None:
        table = self.student.table
        self.texts = list(self.student.spelling.tokens)
        self._unit_of = {token: ids[0] for token, ids in self.student.spelling.ids.items()}
        for side in self.sides:
            side.units = np.where(table.present, np.arange(table.size), NO_UNIT)

    def _name_shared(self) -> None:
        spellings = [side.spelling.ids for side in self.sides]
        self.texts = [token for token in spellings[0] if token in spellings[1]]
        self._unit_of = {token: unit for unit, token in enumerate(self.texts)}
        names = {*self.student.table.marks.values()} & {*self.teacher.table.marks.values()}
        marks = {name: len(self.texts) + n for n, name in enumerate(sorted(names))}
        self.texts += [""] * len(marks)
        for side, other in (self.sides, self.sides[::-1]):
            for token_id, name in side.table.marks.items():
                side.units[token_id] = marks.get(name, NO_UNIT)
            roots = self.roots(side.spelling.ids)
            for token, ids in side.spelling.ids.items():
                side.units[ids] = roots[token]
                if token in self._unit_of:
                    continue
                for at in other.spelling.inner_boundaries(token):
                    crossed = side.remainders.setdefault(token[:at], {})
                    crossed.update((token_id, token[at:]) for token_id in ids)

    def _remainders(self, side: SideUnits, before: str, context: str) -> dict[int, str]:
        """Id -> what it says after ``before``, of the tokens that cross it."""
        if not context:
            return side.remainders.get(before, {})
        tokens = _beginning_with(side.ordered, before)
        if len(tokens) > MOST_IN_CONTEXT:
            return side.remainders.get(before, {})
        other = self.teacher if side is self.student else self.student
        other.spelling.learn([context + token for token in tokens])
        return {
            token_id: token[len(before) :]
            for token in tokens
            if len(context + before) in other.spelling.inner_boundaries(context + token)
            for token_id in side.spelling.ids[token]
        }


def _beginning_with(ordered: Sequence[str], text: str) -> Sequence[str]:
    """Strings longer than ``text`` that begin with it, out of sorted ones."""
    first = bisect_right(ordered, text)
    return ordered[first : bisect_left(ordered, text + _LAST_CHARACTER, lo=first)]
