"""``SeparateTokens``: the student's longer tokens that do not belong to the cell of a shorter text.

A teacher's token `` 1`` is also a statement about `` 14``: had that followed, its tokenizer would
have spelled it with another token. So the student's token `` 14`` is no part of the event `` 1``,
unless the teacher's tokenizer ends a token after `` 1`` in some text that the student's spells
with `` 14``, or the student's does so in a text that is one token of the teacher: `` 1|40``.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mopd_losses.prefix.naming.cuts import Cuts
from mopd_losses.prefix.vocabulary.first_ends import NOT_TEXT, FirstEnds
from mopd_losses.prefix.vocabulary.hashed_strings import (
    Hashes,
    Integers,
    keys_of,
    string_hashes,
)
from mopd_losses.prefix.vocabulary.key_table import KeyTable
from mopd_losses.prefix.vocabulary.marks import Marks, MarksTable
from mopd_losses.prefix.vocabulary.shorter_tokens import TRIED as TRIED_AFTER_SHORTER
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary, last_character
from mopd_protocol.tokenizers.token_table import TextEncoder

#: Longer tokens that are tried for a cell, those with the lowest ids: the frequent ones.
TRIED = 32

#: What is tried after a text: the rest of tokens that begin with its last characters. So many
#: characters of an end, and so many tokens for each end, again with the lowest ids.
ENDS, TOKENS_PER_END = 2, 4

#: Tokens that are tried in place of a number's last digits: about all that begin with a digit and
#: have three digits at most, and years.
TRIED_DIGITS = 256

#: Beginnings of words, and what is tried after white space.
WORDS = ("a", "#")
AFTER_SPACE = (*WORDS, "1")

#: The longest text that is tried, in characters.
LONGEST = 32

#: Cells kept in memory; beyond, all are discarded and computed again.
_CACHED = 500_000

#: The most tokens that a separate token is the beginning of.
FEW = 16


class Place(NamedTuple):
    """The text that each side has begun before a boundary, if a token could continue it."""

    student: str
    teacher: str
    naming: str
    """The end of ``student`` that its last open row has begun: names of cells are what a token
    decides that begins with it."""


class _Longer(NamedTuple):
    """A student's token that begins with a cell's text."""

    cell: int
    place: Place
    text: str  # after the boundary
    shorter: int  # characters of the cell's text


#: A longer token, and its text with a continuation.
_Continued = tuple[_Longer, str]


class SeparateTokens:
    """Finds them for one pair of tokenizers."""

    def __init__(
        self,
        student: SortedVocabulary,
        student_encoder: TextEncoder,
        teacher: SortedVocabulary,
        teacher_encoder: TextEncoder,
        cuts: Cuts,
        marks: MarksTable,
    ) -> None:
        self._student, self._teacher = student, teacher
        self._student_ends = FirstEnds(student, student_encoder)
        self._teacher_ends = FirstEnds(teacher, teacher_encoder)
        self._cuts = cuts
        self._marks = marks
        self.table = KeyTable(_CACHED)

    def of(self, keys: Hashes, cell: Callable[[int], tuple[Place, str]]) -> Integers:
        """Return the numbers of the marks of cells: longer texts, in order, and whether they belong
        to the cell. Unknown ones take one call of each tokenizer.

        Args:
            keys: of a place and a cell's text, i.e. hash and length of ``Place.student`` and of
                ``Place.teacher``, the length of ``Place.naming``, and the hash of the text.
            cell: index of a key -> these.
        """

        def compute(indices: Integers) -> Integers:
            cells = [cell(index) for index in indices.tolist()]
            tried = [
                _Longer(number, place, x, len(text))
                for number, (place, text) in enumerate(cells)
                for x in self._tried(place, text)
            ]
            decided: list[tuple[list[str], list[str]]] = [([], []) for _ in cells]
            for longer, belongs in self._decided(tried):
                decided[longer.cell][belongs].append(longer.text)
            return np.array(
                [
                    self._marks.number_of(self._marks_of(place, *texts))
                    for (place, _), texts in zip(cells, decided, strict=True)
                ]
            )

        return self.table.computed(keys, compute)

    def of_cell(self, place: Place, text: str) -> Marks:
        """Return the marks of one cell."""
        student, teacher, cell = string_hashes([place.student, place.teacher, text])[:, None]
        lengths = np.array([[len(begun)] for begun in place])
        keys = keys_of(student, lengths[0], teacher, lengths[1], lengths[2], cell)
        return self._marks.marks_of(int(self.of(keys, lambda _: (place, text))[0]))

    def are_some_divided(self, place: Place, text: str, longer: Sequence[str]) -> bool:
        """Return whether the teacher's tokenizer ends a token after a cell's text in some longer
        text that is one token of the student.

        Args:
            longer: texts after the boundary.
        """
        tried = [_Longer(0, place, x, len(text)) for x in longer]
        spelled = self._spelled_by_one([(each, each.text) for each in tried])
        ends = self._ends_by_teacher(spelled)
        return any(_is_inside(each, end) for (each, _), end in zip(spelled, ends, strict=True))

    def _tried(self, place: Place, text: str) -> list[str]:
        """The student's frequent tokens, after the boundary."""
        tokens = self._student.specific_tokens(place.student + text, TRIED, FEW)
        texts = [token[len(place.student) :] for token in tokens]
        return [longer for longer in texts if len(longer) <= LONGEST]

    def _marks_of(self, place: Place, separate: list[str], belonging: list[str]) -> Marks:
        marks = dict.fromkeys(separate, False)
        for text in belonging:
            if text.startswith(tuple(separate)):
                marks.setdefault(text, True)
        begun = len(place.student)
        for x in separate:
            tokens = self._student.range_of(place.student + x)
            for rank in range(tokens.longer, tokens.stop):
                marks.setdefault(self._student.string_at(rank)[begun:], True)
        return tuple(sorted(marks.items()))

    def _decided(self, tried: list[_Longer]) -> Iterator[tuple[_Longer, bool]]:
        """Yield the texts that are separate, and those that are not although they begin with one.

        In separate ones the teacher never ends a token after the cell's text, nor after a longer
        one that is not separate. Neither does the student in a longer text that is one token of the
        teacher. Where the student writes a text with a longer token, which may begin later, that
        one is not separate: `` ont|vings`` of ``v``, although `` ontving`` is another token.
        """
        # Only what the student's tokenizer spells with the very token shows where it belongs.
        spelled = self._spelled_by_one([(longer, longer.text) for longer in tried])
        ends = self._ends_by_teacher(spelled)
        named = self._named_by_teacher(spelled, ends)
        # The cells that each is part of, too, by the lengths of their names.
        cells: dict[_Longer, set[int]] = {}
        others: dict[_Longer, set[int]] = {}
        continued: list[_Continued] = []
        for (longer, text), end, name in zip(spelled, ends, named, strict=True):
            # If it is part of the cell already, no continuation makes the text separate.
            if end == NOT_TEXT or name == longer.shorter:
                continue
            cells[longer] = {name} if name else set()
            after = dict.fromkeys(self._continuations(longer))
            continued += [(longer, text + each) for each in after]
        ends = self._ends_by_teacher(continued)
        named = self._named_by_teacher(continued, ends)
        decisive = [
            (each, name)
            for each, end, name in zip(continued, ends, named, strict=True)
            if name or end == len(each[1])
        ]
        begun = [longer.place.student for (longer, _), _ in decisive]
        own_ends = _ends(self._student_ends, begun, [each for each, _ in decisive])
        for ((longer, text), name), own in zip(decisive, own_ends, strict=True):
            if name and own == len(longer.text):
                cells[longer].add(name)
            elif name and own > len(longer.text):
                other = longer._replace(text=text[:own])
                (cells if other in cells else others).setdefault(other, set()).add(name)
            elif not name and _is_inside(longer, own):
                cells[longer].add(longer.shorter)
        separate: set[tuple[int, str]] = set()
        for longer in sorted(cells, key=lambda each: len(each.text)):
            if all((longer.cell, longer.text[:name]) in separate for name in cells[longer]):
                separate.add((longer.cell, longer.text))
                yield longer, False
        for other, names in others.items():
            if any((other.cell, other.text[:name]) not in separate for name in names):
                yield other, True

    def _named_by_teacher(self, texts: list[_Continued], ends: list[int]) -> list[int]:
        """Return the length of the name of the cell that the teacher's first token of a text is
        part of, if it ends after the cell's text and before that of the longer token, else 0."""
        named = [
            end if _is_inside(longer, end) else 0
            for (longer, _), end in zip(texts, ends, strict=True)
        ]
        at = [index for index, (longer, _) in enumerate(texts) if named[index] > longer.shorter]
        pairs = [(texts[index][0].place.naming, texts[index][1][: ends[index]]) for index in at]
        for index, cut in zip(at, self._cuts.of_pairs(pairs).tolist(), strict=True):
            named[index] = max(cut, texts[index][0].shorter)
        return named

    def _spelled_by_one(self, texts: list[_Continued]) -> list[_Continued]:
        """Select what the student's tokenizer spells with one token and continuations."""
        begun = [longer.place.student for longer, _ in texts]
        ends = _ends(self._student_ends, begun, texts)
        return [text for text, end in zip(texts, ends, strict=True) if end == len(text[0].text)]

    def _ends_by_teacher(self, texts: list[_Continued]) -> list[int]:
        """Find the ends of the teacher's first tokens."""
        return _ends(self._teacher_ends, [longer.place.teacher for longer, _ in texts], texts)

    def _continuations(self, longer: _Longer) -> Iterator[str]:
        """Yield what either side may merge with the end of a text, and the ends of the teacher's
        tokens that it may write after the cell's text."""
        place, text = longer.place, longer.text
        for vocabulary, begun in ((self._student, place.student), (self._teacher, place.teacher)):
            yield from continuations(vocabulary, begun + text, TOKENS_PER_END)
        after = text[longer.shorter :]
        most = TRIED_DIGITS if after.isdecimal() else TRIED_AFTER_SHORTER
        for token in self._teacher.frequent_tokens(after, most):
            yield token[len(after) :]
        if text[-1].isspace() and text[-1].isascii():
            yield from AFTER_SPACE


def continuations(vocabulary: SortedVocabulary, text: str, tokens: int) -> list[str]:
    """Return what a token of a vocabulary may consist of together with the end of a text: of so
    many tokens for each length of the end."""
    start = len(text)
    for _ in range(ENDS):
        start = last_character(text[:start])
    return vocabulary.continuations(text[max(start, 1) :], tokens)


def _is_inside(longer: _Longer, end: int) -> bool:
    return longer.shorter <= end < len(longer.text)


def _ends(ends: FirstEnds, begun: list[str], texts: list[_Continued]) -> list[int]:
    whole = [before + text for before, (_, text) in zip(begun, texts, strict=True)]
    return ends.of([len(before) for before in begun], whole).tolist()
