"""``OpenTokens``: likely tokens of the teacher that longer tokens of the student continue.

A teacher of single digits is sure of ``1``, and its next row of ``7``; the student's ``17`` and
``19`` are one token each. A completion with ``42`` shows that the number should begin with ``1``,
and nothing of what follows. The row behind the likely ``1`` is what ``lookaheads`` compare.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_alignment import Alignment, common_prefix
from mopd_losses.prefix.naming.separate_tokens import FEW, Place
from mopd_losses.prefix.pair import TokenizerPair
from mopd_losses.prefix.vocabulary.hashed_strings import Integers
from mopd_losses.prefix.vocabulary.marked_ranges import MarkedCell, ranges_of
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary, utf8_text
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence

#: Least probability of the teacher's token: of two tokens, at most one has it.
LEAST_MASS = 0.5

#: Most mass of longer tokens that begin with the teacher's, as a share of the mass of that token.
LONGER_SHARE = 1e-2

#: Earlier rows of a side that could have a longer token.
_WINDOW = 2

#: Texts kept in memory; beyond, all are discarded and computed again.
_CACHED = 500_000

#: The student's frequent tokens among which one must continue the teacher's.
_FREQUENT = 32


@dataclass(frozen=True)
class OpenToken:
    """A likely token of the teacher, at whose end a token of the student can continue."""

    student_row: int  # whose token covers the end of the teacher's, or would if that followed
    teacher_row: int
    place: Place  # what both sides have begun where both tokens continue
    text: str  # up to the end of the teacher's token
    nats: float  # the teacher's, of the text since the start of the student's token
    boundary: int | None
    """If the completion continues with the teacher's token: which boundary inside the student's is
    its end."""


class OpenTokens:
    """Finds them for one pair of tokenizers."""

    def __init__(self, pair: TokenizerPair) -> None:
        self._pair = pair
        self._student = pair.student
        self._teacher = pair.teacher
        self._separate = pair.separate
        self._open: dict[tuple[Place, str], bool] = {}

    def of(
        self,
        student: TokenSequence,
        score: TeacherScore,
        alignment: Alignment,
        *,
        realised: bool,
        among: Iterable[int] | None = None,
    ) -> list[OpenToken]:
        """Return the open tokens of a completion, in order, where the teacher's tokens since the
        start of the student's are likely, too.

        Args:
            realised: those that the completion continues with, or those that it does not.
            among: the teacher's rows that are looked at; default: all.
        """
        self._pair.clear_if_full()
        if len(self._open) >= _CACHED:
            self._open.clear()
        topk, scored = score.topk, score.completion
        likely = (topk.ids[:, 0] >= 0) & (topk.logprobs[:, 0] >= np.log(LEAST_MASS))
        is_realised = likely & (topk.ids[:, 0] == scored.token_ids)
        rows = np.flatnonzero(likely & (is_realised == realised))
        if among is not None:
            rows = np.intersect1d(rows, [*among]).astype(np.int64)
        spans = np.searchsorted(alignment.teacher_starts, rows, side="right") - 1
        rows, spans = rows[spans >= 0], spans[spans >= 0]
        aligned = rows < alignment.teacher_ends[spans]
        rows, spans = rows[aligned], spans[aligned]
        starts, teacher_starts = _starts(student), _starts(scored)
        # From the teacher's bytes to the student's.
        shifts = (starts[alignment.student_starts] - teacher_starts[alignment.teacher_starts])[
            spans
        ]
        if realised:  # the student's token covers the end of the teacher's
            ends = scored.byte_ends[rows] + shifts
            covering = np.searchsorted(starts, ends - 1, side="right") - 1
            inside = student.byte_ends[covering] > ends
            rows, shifts = rows[inside], shifts[inside]
        open_tokens = (
            self._open_token(student, score, row, shift, starts, teacher_starts, is_realised)
            for row, shift in zip(rows.tolist(), shifts.tolist(), strict=True)
        )
        return [token for token in open_tokens if token is not None]

    def _open_token(
        self,
        student: TokenSequence,
        score: TeacherScore,
        row: int,
        shift: int,
        starts: Integers,
        teacher_starts: Integers,
        is_realised: NDArray[np.bool_],
    ) -> OpenToken | None:
        """Return the open token of a row, if its likely token is one.

        Args:
            shift: from the teacher's bytes to the student's.
            is_realised: [rows], whether the likely token is the completion's.
        """
        token, realised = int(score.topk.ids[row, 0]), bool(is_realised[row])
        if token in self._teacher.table.marks:
            return None
        string, begin = self._teacher.strings[token], int(teacher_starts[row]) + shift
        sides = string.encode("latin-1"), student.text[begin : begin + len(string)]
        same = common_prefix(*(np.frombuffer(side, dtype=np.uint8) for side in sides))
        if (same == len(string)) != realised:
            return None  # the same text in other tokens
        # The student's token that covers the last byte, or the first that differs.
        last = begin + same - realised
        own = int(np.searchsorted(starts, last, side="right")) - 1
        start = int(starts[own])
        first = int(np.searchsorted(teacher_starts, start - shift, side="right")) - 1
        if not (start == last or last < student.byte_ends[own]) or not is_realised[first:row].all():
            return None
        nats = float(score.topk.logprobs[row, 0])
        if self._mass(score, row, string, longer=True) > nats + np.log(LONGER_SHARE):
            return None
        at = max(start, begin)
        begun, text = student.text[start:at].decode("latin-1"), string[at - begin :]
        if _may_be_longer(self._student, student, starts, own, begun + text):
            return None
        if _may_be_longer(self._teacher, score.completion, teacher_starts, row, string):
            return None
        place = Place(begun, string[: at - begin])
        if not self._is_open(place, text):
            return None
        nats = float(score.topk.logprobs[first : row + 1, 0].sum())
        before = int(teacher_starts[first]) + shift
        if before < start:
            nats -= self._mass(score, first, student.text[before:start].decode("latin-1"))
        boundary = row + 1 - first if realised else None
        return OpenToken(own, row, place, text, min(nats, 0.0), boundary)

    def text_before(self, student: TokenSequence, token: OpenToken) -> str | None:
        """Return the completion up to the teacher's token, and that token; None if it cannot be
        sent as text."""
        row = token.student_row
        if any(position < row for position in student.marks):
            return None
        before = student.text[: int(_starts(student)[row])].decode("latin-1")
        return utf8_text(before + token.place.student + token.text)

    def ranges(self, place: Place, text: str) -> list[tuple[int, int]]:
        """Return the ranks of the student's tokens that begin with a text and belong to it."""
        marks = self._separate.of_cell(place, text)
        cells = [MarkedCell(place.student, text, marks)]
        starts, stops, _ = ranges_of(self._student, cells)
        return list(zip(starts.tolist(), stops.tolist(), strict=True))

    def _mass(self, score: TeacherScore, row: int, text: str, *, longer: bool = False) -> float:
        """Nats of the likely tokens of a row that begin with a text, or only of longer ones."""
        ids, nats = score.topk.ids[row], score.topk.logprobs[row].astype(np.float64)
        strings = [self._teacher.strings[token] if token >= 0 else "" for token in ids.tolist()]
        begins = np.array([s.startswith(text) and not (longer and s == text) for s in strings])
        return float(np.logaddexp.reduce(nats[begins], initial=-np.inf))

    def _is_open(self, place: Place, text: str) -> bool:
        """Return whether some frequent token of the student continues the teacher's."""
        is_open = self._open.get((place, text))
        if is_open is None:
            is_open = self._open[place, text] = bool(text) and self._is_continued(place, text)
        return is_open

    def _is_continued(self, place: Place, text: str) -> bool:
        longer = [
            string[len(place.student) :]
            for string in self._student.specific_tokens(place.student + text, _FREQUENT, FEW)
        ]
        if not longer:
            return False
        marks = self._separate.of_cell(place, text)
        excluded = [x for x, belongs in marks if not belongs]
        return any(not any(string.startswith(x) for x in excluded) for string in longer)


def _may_be_longer(
    vocabulary: SortedVocabulary,
    sequence: TokenSequence,
    starts: Integers,
    row: int,
    text: str,
) -> bool:
    """Return whether a text could be part of a longer token that begins a few rows earlier: the
    row's distribution excludes that, and the other side's does not."""
    start = int(starts[row])
    return any(
        vocabulary.covers(sequence.text[int(starts[before]) : start].decode("latin-1") + text)
        for before in range(max(row - _WINDOW, 0), row)
    )


def _starts(sequence: TokenSequence) -> Integers:
    """Bytes before each token."""
    return np.concatenate([[0], sequence.byte_ends[:-1]]).astype(np.int64)
