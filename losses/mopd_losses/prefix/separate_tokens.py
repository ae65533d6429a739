"""``SeparateTokens``: the student's longer tokens that do not belong to the cell of a shorter text.

A teacher's token `` 1`` is also a statement about `` 14``: had that followed, its tokenizer would
have spelled it with another token. So the student's token `` 14`` is no part of the event `` 1``,
unless the teacher's tokenizer ends a token behind `` 1`` in some text that the student's spells
with `` 14``.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from mopd_losses.prefix.vocabulary.hashed_strings import (
    Hashes,
    Integers,
    keys_of,
    string_hashes,
)
from mopd_losses.prefix.vocabulary.key_table import KeyTable
from mopd_losses.prefix.vocabulary.marks import Marks, MarksTable
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary, utf8_text
from mopd_protocol.tokenizers.token_table import TextEncoder

#: Longer tokens that are tried for a cell, those with the lowest ids: the frequent ones.
TRIED = 32

#: What is tried behind a text: the rest of tokens that begin with its last characters. So many
#: lengths of an end, and so many tokens for each, again with the lowest ids.
ENDS, TOKENS_PER_END = 2, 3

#: The longest text that is tried, in characters.
LONGEST = 32

#: Texts and cells kept in memory; beyond, all are discarded and computed again.
_CACHED = 500_000

#: The most tokens that a separate token is the beginning of.
FEW = 16


class Place(NamedTuple):
    """The text that each side has begun before a boundary, if a token could continue it."""

    student: str
    teacher: str


#: A place with a student's token behind the boundary, and that text with a continuation.
_Continued = tuple[tuple[Place, str], str]


class SeparateTokens:
    """Finds them for one pair of tokenizers."""

    def __init__(
        self,
        student: SortedVocabulary,
        student_encoder: TextEncoder,
        teacher: SortedVocabulary,
        teacher_encoder: TextEncoder,
        marks: MarksTable,
    ) -> None:
        self._student, self._teacher = student, teacher
        self._student_ends = FirstEnds(student, student_encoder)
        self._teacher_ends = FirstEnds(teacher, teacher_encoder)
        self._ends: dict[tuple[Place, str], frozenset[int]] = {}
        self._marks = marks
        self.table = KeyTable(_CACHED)

    def of(self, keys: Hashes, cell: Callable[[int], tuple[Place, str]]) -> Integers:
        """Return the numbers of the marks of cells: longer texts, in order, and whether they belong
        to the cell. Unknown ones take one call of each tokenizer.

        Args:
            keys: of a place and a cell's text.
            cell: index of a key -> these.
        """

        def compute(indices: Integers) -> Integers:
            cells = [cell(index) for index in indices.tolist()]
            tried = [self._tried(place, text) for place, text in cells]
            self._find_ends(
                [(place, x) for (place, _), texts in zip(cells, tried, strict=True) for x in texts]
            )
            marks = [
                self._marks_of(place, text, longer)
                for (place, text), longer in zip(cells, tried, strict=True)
            ]
            return np.array([self._marks.number_of(each) for each in marks])

        return self.table.computed(keys, compute)

    def of_cell(self, place: Place, text: str) -> Marks:
        """Return the marks of one cell."""
        hashes = string_hashes([place.student, place.teacher, text])
        lengths = np.array([len(place.student), len(place.teacher)])
        student, teacher, cell = (hashes[at : at + 1] for at in range(3))
        keys = keys_of(student, lengths[:1], teacher, lengths[1:], cell)
        return self._marks.marks_of(int(self.of(keys, lambda _: (place, text))[0]))

    def _tried(self, place: Place, text: str) -> list[str]:
        """The student's frequent tokens, behind the boundary."""
        tokens = self._student.frequent_tokens(place.student + text, TRIED)
        few = (token for token in tokens if self._student.longer_tokens(token) <= FEW)
        texts = [token[len(place.student) :] for token in few]
        return [longer for longer in texts if len(longer) <= LONGEST]

    def _marks_of(self, place: Place, text: str, longer: list[str]) -> Marks:
        marks: dict[str, bool] = {}
        begun = len(place.student)
        for x in longer:
            if _is_separate(x, text, self._ends[place, x]):
                marks[x] = False
        for x in [*marks]:
            tokens = self._student.range_of(place.student + x)
            for rank in range(tokens.longer, tokens.stop):
                marks.setdefault(self._student.string_at(rank)[begun:], True)
        return tuple(sorted(marks.items()))

    def _find_ends(self, texts: list[tuple[Place, str]]) -> None:
        """Find where the teacher may end its first token beyond the boundary, in each text."""
        if len(self._ends) + len(texts) > _CACHED:
            self._ends.clear()
        missing = [text for text in dict.fromkeys(texts) if text not in self._ends]
        # Only what the student's tokenizer spells with the very token shows where it belongs.
        spelled = self._spelled_by_one([(owner, owner[1]) for owner in missing if _is_text(*owner)])
        ends = {owner: {end} for (owner, _), end in self._ends_by_teacher(spelled)}
        # If a token ends inside the text already, no continuation makes the text separate; and a
        # continuation matters only if one does.
        continued = [
            (owner, owner[1] + after)
            for owner, stops in ends.items()
            if stops == {len(owner[1])}
            for after in dict.fromkeys(self._continuations(*owner))
        ]
        continued = [(owner, text) for owner, text in continued if _is_text(owner[0], text)]
        inner = {
            text: end for text, end in self._ends_by_teacher(continued) if end < len(text[0][1])
        }
        for text in self._spelled_by_one([*inner]):
            ends[text[0]].add(inner[text])
        self._ends.update((owner, frozenset(ends.get(owner, ()))) for owner in missing)

    def _spelled_by_one(self, texts: list[_Continued]) -> list[_Continued]:
        """Select what the student's tokenizer spells with one token and continuations."""
        ends = self._student_ends.of([(owner[0].student, text) for owner, text in texts])
        return [text for text, end in zip(texts, ends, strict=True) if end == len(text[0][1])]

    def _ends_by_teacher(self, texts: list[_Continued]) -> Iterator[tuple[_Continued, int]]:
        """Find the ends of the teacher's first tokens."""
        ends = self._teacher_ends.of([(owner[0].teacher, text) for owner, text in texts])
        for text, end in zip(texts, ends, strict=True):
            yield text, min(end, len(text[0][1]))

    def _continuations(self, place: Place, text: str) -> Iterator[str]:
        """Yield what either side may merge with the end of a text."""
        for vocabulary, begun in ((self._student, place.student), (self._teacher, place.teacher)):
            whole = begun + text
            for start in range(max(len(whole) - ENDS, 1), len(whole)):
                for token in vocabulary.frequent_tokens(whole[start:], TOKENS_PER_END):
                    yield token[len(whole) - start :]


def _is_text(place: Place, text: str) -> bool:
    """Return whether both tokenizers take what was begun and a text."""
    return all(utf8_text(begun + text) is not None for begun in place)


def _is_separate(longer: str, text: str, ends: frozenset[int]) -> bool:
    """Return whether the teacher never ends a token behind ``text`` in ``longer``, given where it
    ends its first one; nor inside ``longer``, where another cell could."""
    return bool(ends) and all(end >= len(longer) or end < len(text) for end in ends)


class FirstEnds:
    """Finds the end of the first token that reaches beyond what was begun, by one tokenizer."""

    def __init__(self, vocabulary: SortedVocabulary, encoder: TextEncoder) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._table = KeyTable(_CACHED)

    def of(self, texts: list[tuple[str, str]]) -> list[int]:
        """Return the characters up to that end; 0 if the tokens do not spell the text.

        Args:
            texts: what was begun, and the text behind it. Unknown ones take one call of the
                tokenizer.
        """
        keys = np.array([hash(text) for text in texts], dtype=np.int64).view(np.uint64)

        def compute(indices: Integers) -> Integers:
            return np.array(self._compute([texts[index] for index in indices.tolist()]))

        return self._table.computed(keys, compute).tolist()

    def _compute(self, texts: list[tuple[str, str]]) -> list[int]:
        whole = [(begun + text).encode("latin-1").decode() for begun, text in texts]
        results: list[int] = []
        for (begun, text), ids in zip(texts, self._encoder.encode_batch(whole), strict=True):
            spelled = ""
            for token in ids:
                spelled += self._vocabulary.strings[token]
                if len(spelled) > len(begun):
                    break
            is_spelled = (begun + text).startswith(spelled)
            results.append(max(len(spelled) - len(begun), 0) if is_spelled else 0)
        return results
