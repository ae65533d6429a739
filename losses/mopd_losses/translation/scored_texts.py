"""``ScoredTexts``: completions in both sides' tokens, with the teacher's rows."""

from collections.abc import Sequence
from re import split

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_strings import utf8_text
from mopd_losses.translation.rows import Integers, Rows, expanded
from mopd_losses.translation.vocabulary import CONTROLS, Vocabulary, character_codes
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence

#: A realised token has at least this: the probability of several is divided by.
_LEAST_REALISED_NATS = -80.0

#: Tokens before a place that may depend on what follows it.
_MOST_TOKENS_BEFORE = 6

#: Rows before a position whose tokens may reach beyond it.
_MOST_ROWS_BEFORE = 8

#: Ends each text in an array of codes.
_END = "\U0010ffff"


class SideTokens:
    """The tokens of one side, one completion after another.

    Args:
        sequences: completions.
    """

    def __init__(self, side: Vocabulary, sequences: Sequence[TokenSequence]) -> None:
        spelled = [side.string_of(each) for each in sequences]
        self.strings = [string for string, _ in spelled]
        self.ids: list[int] = [token for each in sequences for token in each.token_ids.tolist()]
        counts = np.array([len(each) for each in sequences], dtype=np.int64)
        self.counts = counts  # [completions]
        self.first = np.cumsum(counts) - counts  # [completions]
        self.completions = np.repeat(np.arange(len(counts)), counts)  # [tokens]
        self.starts = np.array(  # [tokens], in the completion's string
            [start for _, starts in spelled for start in starts], dtype=np.int64
        )
        self.lengths = np.array([*map(len, self.strings)], dtype=np.int64)  # [completions]
        codes = character_codes("".join(string + _END for string in self.strings))
        base = np.cumsum(self.lengths + 1) - self.lengths - 1
        at = base[self.completions] + self.starts
        self.codes = codes[at]  # [tokens], of the first character
        self.codes_before = codes[at - 1]  # [tokens], of the character before
        self.joined = side.joinable[self.codes_before, self.codes]
        """[tokens], whether a token may depend on what is before it."""
        self.joined[self.first[counts > 0]] = False
        self.runs = np.maximum.accumulate(np.where(self.joined, 0, np.arange(len(at))))
        """[tokens], the first of the tokens up to each that are joined."""

    def first_dependent(self) -> Integers:
        """[tokens], the first of the tokens before each that may depend on what follows them, if
        the last of them does."""
        tokens = np.arange(len(self.ids))
        own = self.first[self.completions]
        first = np.maximum(self.runs[np.maximum(tokens - 1, 0)], own)
        # Half a character is not text.
        short = np.maximum(first, tokens - _MOST_TOKENS_BEFORE)
        while len(halves := np.flatnonzero((short > first) & _is_continuation(self.codes[short]))):
            short[halves] -= 1
        return np.minimum(short, tokens)


class ScoredTexts:
    """Completions: where tokens of both sides begin, and rows.

    Rows and positions are those of all completions, one after another.

    Args:
        sides: student and teacher.
    """

    def __init__(
        self,
        sides: tuple[Vocabulary, Vocabulary],
        completions: Sequence[TokenSequence],
        scores: Sequence[TeacherScore],
    ) -> None:
        self._student_side, teacher_side = sides
        self.student = SideTokens(sides[0], completions)
        self.teacher = SideTokens(teacher_side, [score.completion for score in scores])
        self.rows = Rows(
            [(score.topk, score.completion.token_ids) for score in scores], teacher_side.size
        )
        self.row_ends = self.teacher.first + self.teacher.counts  # [completions]
        logprobs = [score.topk.token_logprobs.astype(np.float64) for score in scores]
        nats = np.maximum(np.concatenate([*logprobs, np.zeros(1)]), _LEAST_REALISED_NATS)
        self.nats_before = np.cumsum(nats) - nats
        """[rows + 1], nats of the realised tokens before each row."""
        self.events = sides[0].events[self.student.ids]
        """[positions], the token that stands for the realised one."""
        self._before = self.student.first_dependent().tolist()
        self._rows_before = self.teacher.first_dependent().tolist()
        canonical = [self._canonical_tokens(number) for number in range(len(completions))]
        self._not_canonical = np.cumsum(np.concatenate([[0], *map(np.logical_not, canonical)]))

    def student_before(self, position: int) -> tuple[int, ...]:
        """Return the student's tokens before a position that may depend on what follows them; none
        if its tokenizer divides the text otherwise."""
        first = self._before[position]
        if self._not_canonical[first] != self._not_canonical[position]:
            return ()
        return tuple(self.student.ids[first:position])

    def teacher_before(self, row: int) -> tuple[int, ...]:
        """Return the teacher's tokens before a row that may depend on what follows them."""
        return tuple(self.teacher.ids[self._rows_before[row] : row])

    def open_rows(self) -> tuple[Integers, Integers, Integers]:
        """Return each position and row whose tokens may reach beyond the position, and the row
        whose token contains the position's first character. Positions have none from where the two
        texts differ, and behind the teacher's last token."""
        student, teacher = self.student, self.teacher
        pairs = zip(student.strings, teacher.strings, strict=True)
        common = np.array([_common_length(*pair) for pair in pairs], dtype=np.int64)
        number, offsets = student.completions, student.starts
        is_open = (offsets <= common[number]) & (offsets < teacher.lengths[number])
        positions = np.flatnonzero(is_open)
        number, offsets = number[positions], offsets[positions]
        step = int(max(teacher.lengths.max(initial=0), student.lengths.max(initial=0))) + 1
        starts = teacher.completions * step + teacher.starts
        last = np.searchsorted(starts, number * step + offsets, side="right") - 1
        own = teacher.first[number]
        inside = last - (teacher.starts[last] == offsets)  # the last row that begins before
        first = np.where(inside < own, last, np.maximum(teacher.runs[inside], own))
        first = np.maximum(first, last - _MOST_ROWS_BEFORE)
        which, rows = expanded(first, last - first + 1)
        return positions[which], rows, last[which]

    def _canonical_tokens(self, number: int) -> NDArray[np.bool_]:
        """[tokens], whether the student's tokenizer writes each of its tokens for the text."""
        side, string = self._student_side, self.student.strings[number]
        canonical: set[tuple[int, int]] = set()
        start = 0
        for part in split(CONTROLS, string):
            text = utf8_text(part)
            end = len(part)
            while text is None and end > max(len(part) - 4, 0):
                end -= 1
                text = utf8_text(part[:end])
            at = start
            for token in side.encode([text])[0] if text else ():
                canonical.add((at, token))
                at += len(side.strings[token])
            start += len(part) + 1
        first = int(self.student.first[number])
        own = slice(first, first + int(self.student.counts[number]))
        tokens = zip(self.student.starts[own].tolist(), self.student.ids[own], strict=True)
        return np.array([each in canonical for each in tokens], dtype=np.bool_)


def _is_continuation(codes: Integers) -> NDArray[np.bool_]:
    return (codes >= 0x80) & (codes < 0xC0)


def _common_length(first: str, second: str) -> int:
    """Return the length of the beginning that two strings share."""
    pairs = enumerate(zip(first, second, strict=False))
    shortest = min(len(first), len(second))
    return next((at for at, (own, other) in pairs if own != other), shortest)
