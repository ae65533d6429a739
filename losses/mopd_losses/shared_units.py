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

from mopd_losses.spelling import Spelling
from mopd_protocol.token_table import TextEncoder, TokenTable

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

    def __init__(self, remainders: Mapping[int, str], units: Mapping[str, int]) -> None:
        self.unit_of = {token_id: units[said] for token_id, said in remainders.items()}
        self.said = set(remainders.values())  # what they spell after the text

    @cached_property
    def ids_by_unit(self) -> dict[int, NDArray[np.int64]]:
        """Root of what is said -> ids."""
        if not self.unit_of:
            return {}
        ids = np.fromiter(self.unit_of, dtype=np.int64)
        units = np.fromiter(self.unit_of.values(), dtype=np.int64)
        order = np.argsort(units, kind="stable")
        found, starts = np.unique(units[order], return_index=True)
        parts = np.split(ids[order], starts[1:])
        return dict(zip(found.tolist(), parts, strict=True))


NOTHING_CROSSES = Crossings({}, {})


class SideUnits:
    """One vocabulary, seen through what the other side can name too."""

    def __init__(self, table: TokenTable, spelling: Spelling) -> None:
        self.table = table
        self.spelling = spelling
        self.units = np.full(table.size, NO_UNIT, dtype=np.int64)  # root of each id
        self.remainders: dict[str, dict[int, str]] = {}  # what is crossed -> id -> what is said
        self.crossings: dict[tuple[str, str], Crossings] = {}  # by context and what is crossed
        self.ordered = sorted(spelling.ids)

    def reach(self, text: str, start: int) -> int:
        """The last position up to which some token that begins at ``start`` spells ``text`` and
        then goes on."""
        first, last, at = 0, len(self.ordered), start
        while at < len(text):
            begun = text[start : at + 1]
            first = bisect_right(self.ordered, begun, first, last)  # longer ones only
            last = bisect_left(self.ordered, begun + _LAST_CHARACTER, first, last)
            if first == last:
                break
            at += 1
        return at


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
        self._extensions: dict[int, list[int] | None] = {}
        self._wide: set[int] = set()
        if self.same:
            self._name_every_id()
        else:
            self._name_shared()
        self._ordered = sorted(self._unit_of)
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

    def crossings(self, side: SideUnits, before: str, context: str) -> Crossings:
        """Tokens of ``side`` that cross ``before``.

        Args:
            context: what the other side's token has spelt before they begin; empty where the other
                side has a boundary there.
        """
        if self.same:
            return NOTHING_CROSSES
        key = (context, before)
        if key not in side.crossings:
            if len(side.crossings) > MOST_REMEMBERED:
                side.crossings.clear()
            remainders = self._remainders(side, before, context)
            units = self.roots({*remainders.values()})
            side.crossings[key] = Crossings(remainders, units) if remainders else NOTHING_CROSSES
        return side.crossings[key]

    def extensions(self, unit: int) -> Sequence[int] | None:
        """Longer units that begin with this one; None where they are too many."""
        if unit not in self._extensions:
            longer = _beginning_with(self._ordered, self.texts[unit])
            few = len(longer) <= MOST_EXTENSIONS
            self._extensions[unit] = [self._unit_of[text] for text in longer] if few else None
        return self._extensions[unit]

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
