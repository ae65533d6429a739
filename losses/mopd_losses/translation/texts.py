"""``Texts``: what a teacher may write at a position, and what the student may write first for it.

A text is a succession of the teacher's tokens behind a context. Texts are numbered, so that the
same ones of different positions are decided once.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mopd_losses.translation.first_tokens import (
    ANY,
    UNDECIDED,
    FirstTokens,
    Text,
)
from mopd_losses.translation.rows import Integers
from mopd_losses.translation.vocabulary import Vocabulary, character_codes

#: In place of a set's number: the teacher's tokenizer does not write it. Others are not known yet,
#: or of texts that end before the position.
IMPOSSIBLE, UNKNOWN, BEFORE = -1, -2, -3


class Texts:
    """Numbered texts and sets of first tokens; both are kept."""

    def __init__(self, student: Vocabulary, teacher: Vocabulary, tokens: FirstTokens) -> None:
        self._student, self._teacher = student, teacher
        self._tokens = tokens
        self._contexts: dict[Text, int] = {}
        self._numbers: dict[int, int] = {}  # of a text and one more token
        self._texts: list[Text] = []
        self._sets: dict[frozenset[int], int] = {}
        self._members: list[frozenset[int]] = []
        self._certain: list[int] = []  # by set: its only token, or ``UNDECIDED``
        self._known: tuple[list[int], list[int]] = ([], [])  # by text: set, few and many trials
        self._ended: list[int] = []  # by text, see ``tokens_if_ended``

    def __len__(self) -> int:
        return len(self._texts)

    def context(
        self, student_ids: tuple[int, ...], teacher_ids: tuple[int, ...], missing: str
    ) -> int:
        """Return the number of the empty text behind the tokens of both sides.

        Args:
            missing: text between the end of the teacher's tokens and the position.
        """
        context = Text(student_ids, teacher_ids, "", missing)
        if context not in self._contexts:
            self._contexts[context] = self._add(context)
        return self._contexts[context]

    def longer(self, texts: Integers, tokens: Integers) -> Integers:
        """Return the numbers of texts with one more token each."""
        keys, which = np.unique(texts * self._teacher.size + tokens, return_inverse=True)
        return np.array([self._longer(key) for key in keys.tolist()], dtype=np.int64)[which]

    def _longer(self, key: int) -> int:
        if key not in self._numbers:
            text, token = divmod(key, self._teacher.size)
            before, teacher_ids, begun, missing = self._texts[text]
            string = self._teacher.strings[token]
            behind = begun + string[len(missing) :]
            if behind and not begun and before:
                joins = self._student.joins(self._student.strings[before[-1]][-1], behind[0])
                before = before if joins else ()
            longer = Text(before, (*teacher_ids, token), behind, missing[len(string) :])
            self._numbers[key] = self._add(longer)
        return self._numbers[key]

    def _add(self, text: Text) -> int:
        self._texts.append(text)
        for column in (*self._known, self._ended):
            column.append(UNKNOWN)
        return len(self._texts) - 1

    def missing(self, text: int) -> str:
        """Return the text between the end of a text's tokens and the position."""
        return self._texts[text].missing

    def begun(self, texts: Integers) -> NDArray[np.bool_]:
        """Return whether each text reaches beyond the position."""
        numbers, which = np.unique(texts, return_inverse=True)
        begun = [self._texts[number].text != "" for number in numbers.tolist()]
        return np.array(begun, dtype=np.bool_)[which]

    def sets(self, texts: Integers, many: NDArray[np.bool_]) -> Integers:
        """Return the set of the student's first tokens of each text; ``IMPOSSIBLE``, or ``BEFORE``
        for text that ends before the position.

        Args:
            many: whether many continuations are tried.
        """
        keys, which = np.unique(2 * texts + many, return_inverse=True)
        distinct = keys.tolist()
        unknown = [key for key in distinct if self._known[key % 2][key // 2] == UNKNOWN]
        self._decide(unknown)
        return np.array([self._known[key % 2][key // 2] for key in distinct], dtype=np.int64)[which]

    def _decide(self, keys: Sequence[int]) -> None:
        texts = [self._texts[key // 2] for key in keys]
        begun = [(text, key % 2 == 1) for text, key in zip(texts, keys, strict=True) if text.text]
        sets = iter(self._tokens.of(begun))
        possible = iter(self._tokens.may_write([text for text in texts if not text.text]))
        for text, key in zip(texts, keys, strict=True):
            self._known[key % 2][key // 2] = (
                self._number(next(sets)) if text.text else BEFORE if next(possible) else IMPOSSIBLE
            )

    def _number(self, tokens: frozenset[int]) -> int:
        if tokens not in self._sets:
            self._sets[tokens] = len(self._members)
            self._members.append(tokens)
            is_certain = len(tokens) == 1 and ANY not in tokens
            self._certain.append(next(iter(tokens)) if is_certain else UNDECIDED)
        return self._sets[tokens]

    def certain(self, sets: Integers) -> Integers:
        """Return the only token of each set, or ``UNDECIDED``."""
        certain = np.array([*self._certain, UNDECIDED], dtype=np.int64)
        return np.where(sets >= 0, certain[sets], UNDECIDED)

    def members(self, number: int) -> frozenset[int]:
        """Return the tokens of a set."""
        return self._members[number]

    def tokens_if_ended(self, texts: Integers, following: Integers) -> Integers:
        """Return the student's first token of each text whose next token cannot be joined with it,
        or ``UNDECIDED``: where no token contains the two characters, text is divided.

        Args:
            following: code of the next token's first character.
        """
        numbers, which = np.unique(texts, return_inverse=True)
        unknown = [each for each in numbers.tolist() if self._ended[each] == UNKNOWN]
        for number, token in zip(
            unknown, self._tokens.ended([self._texts[each] for each in unknown]), strict=True
        ):
            self._ended[number] = token
        distinct = numbers.tolist()
        last = character_codes("".join(self._texts[number].text[-1] for number in distinct))
        tokens = np.array([self._ended[number] for number in distinct], dtype=np.int64)
        joined = self._student.joinable[last[which], following]
        return np.where(joined, UNDECIDED, tokens[which])
