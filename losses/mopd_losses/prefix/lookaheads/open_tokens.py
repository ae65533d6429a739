"""``OpenTokens``: likely tokens of the teacher that longer tokens of the student continue.

A teacher of single digits is sure of ``1``, and its next row of ``7``; the student's ``17`` and
``19`` are one token each. A completion with ``42`` shows that the number should begin with ``1``,
and nothing of what follows. The row after the likely ``1`` is what ``lookaheads`` compare, and the
rows after the tokens that are likely next. The completion may have continued with a longer token
of the teacher: `` n``, where a space was likely. The student's token may have ended before the
teacher's, where a longer one would have continued with it: its `` neun``, where the teacher expects
``und``.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_alignment import Alignment, common_prefix
from mopd_losses.alignment.byte_strings import utf8_text
from mopd_losses.prefix.naming.separate_tokens import FEW, TRIED, Place
from mopd_losses.prefix.pair import TokenizerPair
from mopd_losses.prefix.vocabulary.hashed_strings import Integers, indices_in_runs
from mopd_losses.prefix.vocabulary.marked_ranges import MarkedCell, ranges_of
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs

#: Least probability of the teacher's token: of two tokens, at most one has it.
LEAST_MASS = 0.5

#: Most mass of longer tokens that begin with the teacher's, as a share of the mass of that token.
LONGER_SHARE = 1e-2

#: Earlier rows of a side that could have a longer token.
_WINDOW = 2

#: Texts kept in memory; beyond, all are discarded and computed again.
_CACHED = 500_000

#: The student's likely tokens that are tried to continue the teacher's.
_GUESSES = 4

#: The student's frequent tokens among which one must continue the teacher's.
_FREQUENT = 512

#: Tokens that continue a text; comparisons of more would cost too much.
_MOST_TOKENS = 4_096


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
        sampled: bool,
        among: Iterable[int] | None = None,
    ) -> list[OpenToken]:
        """Return the open tokens of a completion, in order, where the teacher's tokens since the
        start of the student's are likely, too.

        Args:
            sampled: those that the completion continues with, or those that it does not.
            among: the teacher's rows that are looked at; default: all.
        """
        self._pair.clear_if_full()
        if len(self._open) >= _CACHED:
            self._open.clear()
        topk, scored = score.topk, score.completion
        likely = (topk.ids[:, 0] >= 0) & (topk.logprobs[:, 0] >= np.log(LEAST_MASS))
        is_sampled = likely & (topk.ids[:, 0] == scored.token_ids)
        rows = np.flatnonzero(likely & (is_sampled == sampled))
        if among is not None:
            rows = np.intersect1d(rows, [*among]).astype(np.int64)
        spans = np.searchsorted(alignment.teacher_starts, rows, side="right") - 1
        rows, spans = rows[spans >= 0], spans[spans >= 0]
        aligned = rows < alignment.teacher_ends[spans]
        rows, spans = rows[aligned], spans[aligned]
        starts, teacher_starts = student.byte_starts, scored.byte_starts
        # From the teacher's bytes to the student's.
        span_shifts = starts[alignment.student_starts] - teacher_starts[alignment.teacher_starts]
        shifts = span_shifts[spans]
        runs = (alignment.student_starts, alignment.student_ends)
        own_spans, own_rows = indices_in_runs(*(each.astype(np.int64) for each in runs))
        own_shifts = np.full(len(starts), -1 - len(score.completion.text))  # in no span
        own_shifts[own_rows] = span_shifts[own_spans]
        if sampled:  # the student's token covers the end of the teacher's
            ends = scored.byte_ends[rows] + shifts
            covering = np.searchsorted(starts, ends - 1, side="right") - 1
            inside = student.byte_ends[covering] > ends
            rows, shifts = rows[inside], shifts[inside]
        kept = ~self._teacher.is_control[topk.ids[rows, 0]] & ~self._have_longer(topk, rows)
        completion = _Completion(
            student,
            score,
            starts.tolist(),
            teacher_starts.tolist(),
            np.cumsum(~is_sampled).tolist(),
            own_shifts.tolist(),
        )
        open_tokens = (
            self._open_token(completion, row, shift, sampled)
            for row, shift in zip(rows[kept].tolist(), shifts[kept].tolist(), strict=True)
        )
        return [token for token in open_tokens if token is not None]

    def _open_token(
        self, completion: "_Completion", row: int, shift: int, sampled: bool
    ) -> OpenToken | None:
        """Return the open token of a row, if its likely token is one.

        Args:
            shift: from the teacher's bytes to the student's.
            sampled: whether the likely token is the completion's.
        """
        student, score, starts = completion.student, completion.score, completion.starts
        string = self._teacher.strings[int(score.topk.ids[row, 0])]
        begins = completion.teacher_starts[row]
        begin = begins + shift
        same = _common_length(string.encode("latin-1"), student.text[begin : begin + len(string)])
        follows = same == len(string)
        if follows != sampled and same >= score.completion.byte_ends[row] - begins:
            return None  # the same text in other tokens
        # The student's token that covers the last byte, or the first that differs.
        last = begin + same - sampled
        own = bisect_right(starts, last) - 1
        if not (starts[own] == last or last < student.byte_ends[own]):
            return None
        longer = _longer_row(self._student, student, starts, own, begin, string)
        if longer < own and (sampled or any(s != shift for s in completion.shifts[longer:own])):
            return None
        own, start = longer, starts[longer]
        first = bisect_right(completion.teacher_starts, start - shift) - 1
        if completion.differing(first, row):
            return None
        at = max(start, begin)
        begun, text = student.text[start:at].decode("latin-1"), string[at - begin :]
        teacher_starts = completion.teacher_starts
        if _longer_row(self._teacher, score.completion, teacher_starts, row, begins, string) < row:
            return None
        place = Place(begun, string[: at - begin], begun)
        if not self.is_open(place, text):
            return None
        nats = float(score.topk.logprobs[first : row + 1, 0].sum())
        before = teacher_starts[first] + shift
        if before < start:
            nats -= self._mass(score.topk, first, student.text[before:start].decode("latin-1"))
        boundary = row + 1 - first if sampled else None
        return OpenToken(own, row, place, text, min(nats, 0.0), boundary)

    def text_of(
        self, student: TokenSequence, token: OpenToken, likely_ids: Sequence[int] = ()
    ) -> str | None:
        """Return the completion up to the teacher's token, and that token; None if it cannot be
        sent as text.

        Args:
            likely_ids: the student's likeliest ids in the token's row, in order. The text ends with
                the first of them that continues the teacher's token.
        """
        row = token.student_row
        if any(position < row for position in student.marks):
            return None
        before = student.text[: student.byte_starts[row]].decode("latin-1")
        begun = token.place.student + token.text
        for text in (*self._continuing(token, likely_ids), begun):
            text = utf8_text(before + text)
            if text is not None:
                return text
        return None

    def _continuing(self, token: OpenToken, likely_ids: Sequence[int]) -> list[str]:
        """Return the first of the student's tokens that begin with the teacher's and belong to it,
        and in front of whose rest the teacher's tokenizer keeps its token."""
        begun = token.place.student + token.text
        ranks = [
            self._student.ranks[each] for each in likely_ids if 0 <= each < len(self._student.ranks)
        ]
        ranges = self.ranges(token.place, token.text)
        texts = [
            self._student.string_at(int(rank))
            for rank in ranks
            if any(start <= rank < stop for start, stop in ranges)
        ]
        texts = [text for text in texts if len(text) > len(begun)][:_GUESSES]
        string = token.place.teacher + token.text
        ids = self._teacher.ids[[self._teacher.range_of(string).start]]
        rests = [text[len(begun) :] for text in texts]
        kept = self._pair.teacher_canonical.keep(ids, string, rests) if texts else ()
        return [text for text, keeps in zip(texts, kept, strict=True) if keeps][:1]

    def followed(
        self, token: OpenToken, ids: Sequence[int], following: TopKLogprobs
    ) -> list[OpenToken]:
        """Return the open tokens that follow a token, while each is the teacher's likeliest. The
        last one may end a token of the student.

        Args:
            ids: the teacher's tokens after the token.
            following: its rows, from that after the token on.
        """
        tokens = [token]
        for row, each in enumerate(ids):
            if each != following.ids[row, 0]:
                break
            after = self.after(tokens, following.rows(row, row + 1))
            if after is None:
                break
            tokens.append(after)
        return tokens[1:]

    def after(self, tokens: Sequence[OpenToken], following: TopKLogprobs) -> OpenToken | None:
        """Return the teacher's likeliest token after open tokens that follow each other, if it is
        open, too, or ends a token of the student.

        Args:
            following: its row after the last one.
        """
        last, each = tokens[-1], int(following.ids[0, 0])
        logprob = float(following.logprobs[0, 0])
        if each < 0 or logprob < np.log(LEAST_MASS) or not self.is_open(last.place, last.text):
            return None
        if self._teacher.is_control[each]:
            return None
        string = self._teacher.strings[each]
        if self._have_longer(following, np.array([0])).any():
            return None
        texts = [token.place.teacher + token.text for token in tokens[-_WINDOW:]]
        if any(self._teacher.covers("".join(texts[at:]) + string) for at in range(len(texts))):
            return None
        begun = last.place.student + last.text
        place = Place(begun, "", begun)
        token = replace(last, place=place, text=string, nats=min(last.nats + logprob, 0.0))
        if self.is_open(place, string) or self._student.is_token(begun + string):
            return token
        return None

    def ranges(self, place: Place, text: str) -> list[tuple[int, int]]:
        """Return the ranks of the student's tokens that begin with a text and belong to it."""
        marks = self._separate.of_cell(place, text)
        cells = [MarkedCell(place.student, text, marks)]
        starts, stops, _ = ranges_of(self._student, cells)
        return list(zip(starts.tolist(), stops.tolist(), strict=True))

    def _mass(self, topk: TopKLogprobs, row: int, text: str) -> float:
        """Nats of the likely tokens of a row that begin with a text."""
        tokens, ranks = self._teacher.range_of(text), self._ranks(topk.ids[row])
        begins = (ranks >= tokens.start) & (ranks < tokens.stop)
        nats = topk.logprobs[row][begins].astype(np.float64)
        return float(np.logaddexp.reduce(nats, initial=-np.inf))

    def _have_longer(self, topk: TopKLogprobs, rows: Integers) -> NDArray[np.bool_]:
        """[rows], whether longer tokens that begin with the likeliest one have more than a small
        share of its mass."""
        tokens, numbers = np.unique(topk.ids[rows, 0], return_inverse=True)
        ranges = (self._teacher.range_of(self._teacher.strings[each]) for each in tokens.tolist())
        bounds = np.array([(each.longer, each.stop) for each in ranges], dtype=np.int64)
        starts, stops = bounds.reshape(-1, 2)[numbers].T
        results = np.zeros(len(rows), dtype=np.bool_)
        at = np.flatnonzero(starts < stops)
        ranks, nats = self._ranks(topk.ids[rows[at]]), topk.logprobs[rows[at]].astype(np.float64)
        are_longer = (ranks >= starts[at, None]) & (ranks < stops[at, None])
        masses = np.where(are_longer, np.exp(nats), 0.0).sum(axis=1)
        results[at] = masses > LONGER_SHARE * np.exp(nats[:, 0])
        return results

    def _ranks(self, ids: NDArray[np.int32]) -> Integers:
        """Return the ranks of the teacher's tokens; -1 for entries without an id."""
        return np.where(ids >= 0, self._teacher.ranks[ids], -1)

    def is_open(self, place: Place, text: str) -> bool:
        """Return whether some frequent token of the student continues the teacher's."""
        is_open = self._open.get((place, text))
        if is_open is None:
            is_open = self._open[place, text] = bool(text) and self._is_continued(place, text)
        return is_open

    def _is_continued(self, place: Place, text: str) -> bool:
        begun = place.student + text
        tokens = self._student.range_of(begun)
        if tokens.stop - tokens.start > _MOST_TOKENS:
            return False
        tried, longer = (
            [
                string[len(place.student) :]
                for string in self._student.specific_tokens(begun, count, FEW)
            ]
            for count in (TRIED, _FREQUENT)
        )
        excluded = [x for x, belongs in self._separate.of_cell(place, text) if not belongs]
        if any(not any(string.startswith(x) for x in excluded) for string in tried):
            return True
        return self._separate.are_some_divided(place, text, longer[len(tried) :])


@dataclass(frozen=True, eq=False)
class _Completion:
    """A completion of both sides. Its columns are lists: of many rows, a few entries each."""

    student: TokenSequence
    score: TeacherScore
    starts: list[int]  # [the student's rows], bytes before
    teacher_starts: list[int]  # [the teacher's rows]
    others: list[int]
    """[the teacher's rows], how many up to each have another likeliest token than the completion's,
    or none that is likely."""
    shifts: list[int]  # [the student's rows], from the teacher's bytes to the student's

    def differing(self, first: int, last: int) -> bool:
        """Return whether some of the teacher's rows [first, last) are among ``others``."""
        before = self.others[first - 1] if first else 0
        return first < last and self.others[last - 1] > before


def _common_length(first: bytes, second: bytes) -> int:
    """Bytes that both begin with."""
    if first == second:
        return len(first)
    return common_prefix(*(np.frombuffer(side, dtype=np.uint8) for side in (first, second)))


def _longer_row(
    vocabulary: SortedVocabulary,
    sequence: TokenSequence,
    starts: Sequence[int],
    row: int,
    end: int,
    text: str,
) -> int:
    """Return the first of a few rows up to this one in which a token could continue all that
    follows its start, with a text after byte ``end``: the rows after it exclude that token."""
    for before in range(max(row - _WINDOW, 0), row):
        begun = sequence.text[starts[before] : end].decode("latin-1")
        if vocabulary.covers(begun + text):
            return before
    return row
