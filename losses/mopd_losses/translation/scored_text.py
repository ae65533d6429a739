"""``ScoredText``: one completion in both sides' tokens, with the teacher's rows."""

from bisect import bisect_right
from dataclasses import dataclass
from re import split

import numpy as np

from mopd_losses.alignment.byte_strings import is_continuation, utf8_text
from mopd_losses.translation.vocabulary import CONTROLS, Vocabulary
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs

#: Candidates of less are part of the rest: they matter to no token.
_LEAST_NATS = np.log(3e-5)

#: A realised token has at least this: the probability of several is divided by.
_LEAST_REALISED_NATS = -80.0

#: Tokens before a place that may depend on what follows it.
_MOST_TOKENS_BEFORE = 6


@dataclass(frozen=True, eq=False)
class Row:
    """A teacher's distribution: its candidates and the rest."""

    ids: list[int]
    probabilities: list[float]
    tail: float

    @classmethod
    def of(cls, topk: TopKLogprobs, row: int, token: int | None = None) -> "Row":
        """Read a row; ``token`` is the realised one, which is added if the top-k omits it."""
        kept = (topk.ids[row] >= 0) & (topk.logprobs[row] >= _LEAST_NATS)
        ids = topk.ids[row][kept].tolist()
        probabilities = np.exp(topk.logprobs[row][kept].astype(np.float64)).tolist()
        if token is not None and token not in ids:
            ids.append(token)
            probabilities.append(float(np.exp(np.float64(topk.token_logprobs[row]))))
        return cls(ids, probabilities, max(1.0 - sum(probabilities), 0.0))


class ScoredText:
    """One completion: its string, where tokens of both sides begin, and rows.

    Args:
        index: of the completion in its batch, which extra rows name.
        sides: student and teacher.
    """

    def __init__(
        self,
        index: int,
        sides: tuple[Vocabulary, Vocabulary],
        completion: TokenSequence,
        score: TeacherScore,
    ) -> None:
        self.index = index
        self._student, self._teacher = sides
        own, self._student_starts = self._student.string_of(completion)
        other, self.teacher_starts = self._teacher.string_of(score.completion)
        self.string = _common(own, other)
        self.student_ids: list[int] = completion.token_ids.tolist()
        self.teacher_ids: list[int] = score.completion.token_ids.tolist()
        self._length = len(other)
        self._topk = score.topk
        self._rows: dict[int, Row] = {}
        logprobs = np.maximum(score.topk.token_logprobs.astype(np.float64), _LEAST_REALISED_NATS)
        self.nats_before: list[float] = np.concatenate([[0.0], np.cumsum(logprobs)]).tolist()
        """[rows + 1], nats of the realised tokens before each row."""
        self._canonical = self._canonical_tokens(own)

    def row(self, number: int) -> Row | None:
        """Return a row of the score; None behind the last one."""
        if number >= len(self.teacher_ids):
            return None
        if number not in self._rows:
            self._rows[number] = Row.of(self._topk, number, self.teacher_ids[number])
        return self._rows[number]

    def start_of(self, position: int) -> int:
        """Return where a student token begins."""
        return self._student_starts[position]

    def event_of(self, position: int) -> int:
        """Return the token that stands for the realised one: all that end the turn are one."""
        string = self._student.strings[self.student_ids[position]]
        return self._student.control_ids.get(string, self.student_ids[position])

    def student_id(self, token: int, position: int) -> int:
        """Return the realised token for the one that stands for it."""
        return self.student_ids[position] if token == self.event_of(position) else token

    def covering_row(self, offset: int) -> int | None:
        """Return the teacher's row whose token contains a character; None where the two texts
        differ, and behind the last token."""
        if offset > len(self.string) or offset >= self._length:
            return None
        return bisect_right(self.teacher_starts, offset) - 1

    def student_before(self, position: int, following: str) -> tuple[int, ...]:
        """Return the student's tokens before a position that may depend on the character behind
        them; none if its tokenizer divides the text otherwise."""
        first = self._first_dependent(self._student, self._student_starts, position, following)
        if not self._canonical[first:position].all():
            return ()
        return tuple(self.student_ids[first:position])

    def written(self, row: int, ids: tuple[int, ...], offset: int, text: str) -> tuple[int, ...]:
        """Return the teacher's tokens up to the end of a text that begins at an offset, from where
        it matters: realised ones before a row, and others behind these."""
        covering = self.covering_row(offset)
        first = row if covering is None else min(row, covering)
        start = self.teacher_starts[first]
        following = self.string[start] if start < offset else text[0]
        first = self._first_dependent(self._teacher, self.teacher_starts, first, following)
        return (*self.teacher_ids[first:row], *ids)

    def _first_dependent(
        self, side: Vocabulary, starts: list[int], number: int, following: str
    ) -> int:
        """Return the first of the tokens before another one that may depend on what follows."""
        first = number
        while first and side.joins(self.string[starts[first] - 1], following):
            # Half a character is not text.
            if number - first >= _MOST_TOKENS_BEFORE and not is_continuation(ord(following)):
                break
            first -= 1
            following = self.string[starts[first]]
        return first

    def _canonical_tokens(self, string: str) -> "np.typing.NDArray[np.bool_]":
        """[tokens], whether the student's tokenizer writes each of its tokens for the text."""
        canonical: set[tuple[int, int]] = set()
        start = 0
        for part in split(CONTROLS, string):
            text = utf8_text(part)
            end = len(part)
            while text is None and end > max(len(part) - 4, 0):
                end -= 1
                text = utf8_text(part[:end])
            at = start
            for token in self._student.encode([text])[0] if text else ():
                canonical.add((at, token))
                at += len(self._student.strings[token])
            start += len(part) + 1
        own = zip(self._student_starts, self.student_ids, strict=True)
        return np.array([each in canonical for each in own], dtype=np.bool_)


def _common(first: str, second: str) -> str:
    """Return the beginning that two strings share."""
    pairs = enumerate(zip(first, second, strict=False))
    shortest = min(len(first), len(second))
    return first[: next((at for at, (own, other) in pairs if own != other), shortest)]
