"""Corrections: another token of the student where its teacher finds a completion implausible.

Behind a wrong token a teacher scores text that it would never write. A weak student's completions
are mostly such text: it learns the first wrong token of each, and little from the rest. With a
correction the completion continues from the teacher's choice instead, as in speculative knowledge
distillation (arXiv 2410.11325), which also lets the teacher replace implausible tokens. In that
method both share a tokenizer and the teacher samples along. Here the text of its likeliest token,
known from the scores, selects the student's likeliest token that agrees with it.

A teacher that is not sure writes implausible tokens, too, and in a long text some token always is.
How many are expected in its own text follows from the scores: as long as these are few, an
implausible token shows that the text is another's.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_alignment import common_prefix
from mopd_protocol.arrays import FloatArray
from mopd_protocol.samples import Rollout, TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.data.examples import TrainingExample


@dataclass(frozen=True, eq=False)
class Correction:
    """The first tokens of a completion, and another one behind them."""

    rollout: Rollout
    kept: int
    token_id: int

    @property
    def token_ids(self) -> list[int]:
        """Return the kept tokens and the other one."""
        return [*self.rollout.completion.token_ids[: self.kept].tolist(), self.token_id]


def correction_of(
    example: TrainingExample,
    student: TokenTable,
    teachers: Callable[[str], TokenTable],
    *,
    least_ratio: float,
    significance: float,
) -> Correction | None:
    """Return the correction of the first implausible token.

    None without such a token; behind text that the teacher's tokenizer changed, or a control token;
    where the teacher's own text has implausible tokens, too; and if none of the student's likeliest
    tokens agrees with the teacher's.

    Args:
        teachers: name -> table; the sample's teacher with the largest weight corrects.
        least_ratio: a token is implausible if it is less than this times as likely as the
            teacher's likeliest one.
        significance: the token is corrected if fewer than this many implausible ones are expected
            in the teacher's own text up to it.
    """
    if example.rollout.sampled_logprobs is None or not example.scores:
        return None
    scored = max(example.scores, key=lambda score: score.weight)
    completion, score = scored.teacher_input.completion, scored.score
    comparable = _comparable_bytes(completion, score.completion)
    sides = _Sides(example.rollout, completion, student, teachers(scored.teacher))
    expected = np.cumsum(implausible_masses(score, least_ratio))
    for row in implausible_rows(score, least_ratio).tolist():
        if expected[row] >= significance:
            return None
        start = int(score.completion.byte_starts[row])
        if start > comparable:
            return None
        entries = score.topk.ids[row][score.topk.ids[row] >= 0].tolist()
        correction = sides.correction(
            start, entries[0], [*entries[1:], int(score.completion.token_ids[row])]
        )
        if correction is not None:
            return correction
    return None


def implausible_rows(score: TeacherScore, least_ratio: float) -> NDArray[np.int64]:
    """Return the rows whose token is less than ``least_ratio`` times as likely as the likeliest."""
    return np.flatnonzero(score.topk.token_logprobs < _least_logprobs(score.topk, least_ratio))


def implausible_masses(score: TeacherScore, least_ratio: float) -> NDArray[np.float64]:
    """Return the probability in each row of all implausible tokens; those outside the top-k count
    as implausible, although few likely ones may be among them where k is small."""
    topk = score.topk
    likely = topk.logprobs >= _least_logprobs(topk, least_ratio)[:, None]
    masses = np.where(likely, 0.0, np.exp(topk.logprobs.astype(np.float64))).sum(axis=1)
    return masses + np.exp(topk.tail_logprobs.astype(np.float64))


def _least_logprobs(topk: TopKLogprobs, least_ratio: float) -> FloatArray:
    """[rows], nats, of a plausible token."""
    return topk.logprobs[:, 0] + math.log(least_ratio)


@dataclass(frozen=True, eq=False)
class _Sides:
    """A completion in the student's tokens, and both vocabularies."""

    rollout: Rollout
    completion: TokenSequence
    """With control tokens as the teacher received them."""
    student: TokenTable
    teacher: TokenTable

    def correction(self, start: int, likeliest: int, others: Sequence[int]) -> Correction | None:
        """Return the correction by a teacher's token that begins at byte ``start``.

        None if no likely token of the student agrees with it.

        Args:
            likeliest: the teacher's token.
            others: less likely tokens of the teacher in the same place.
        """
        ends = self.completion.byte_ends
        first_control = min(self.completion.marks, default=len(ends))
        kept = min(int(np.searchsorted(ends, start, side="right")), first_control)
        kept_end = int(ends[kept - 1]) if kept else 0
        if likeliest in self.teacher.marks:
            return self._ended(kept, likeliest) if kept_end == start else None
        before = self.completion.text[kept_end:start]
        text = before + self.teacher.bytes_of(likeliest)
        if len(text) == len(before):
            return None
        longer = [before + self.teacher.bytes_of(token_id) for token_id in others]
        excluded = tuple(each for each in longer if len(each) > len(text))
        longer_id = self._longer(kept, text, excluded)
        if longer_id is not None:
            return Correction(self.rollout, kept - 1, longer_id)
        written = b""
        for position in range(kept, len(ends)):
            sampled = int(self.rollout.completion.token_ids[position])
            token_id = self._agreeing(position, written, text, excluded, sampled)
            if token_id is None:
                return None
            if token_id != sampled:
                return Correction(self.rollout, position, token_id)
            written += self.student.bytes_of(token_id)
        return None

    def _longer(self, kept: int, text: bytes, excluded: tuple[bytes, ...]) -> int | None:
        """Return the token in place of the last kept one, if that could have been longer: after
        ``19``, the text ``6`` is that of ``196``, which the student's tokenizer would not divide.
        """
        if not kept:
            return None
        last = int(self.rollout.completion.token_ids[kept - 1])
        before = self.student.bytes_of(last)
        excluded = tuple(before + each for each in excluded)
        return self._completing(kept - 1, b"", before + text, excluded, last)

    def _ended(self, kept: int, teacher_id: int) -> Correction | None:
        ending = self.student.roles.ending
        if teacher_id not in self.teacher.roles.ending or not ending:
            return None
        if {*self.rollout.completion.token_ids[kept : kept + 1].tolist()} & {*ending}:
            return None  # the teacher prefers another of its ends
        return Correction(self.rollout, kept, ending[0])

    def _agreeing(
        self, position: int, written: bytes, text: bytes, excluded: tuple[bytes, ...], sampled: int
    ) -> int | None:
        """Return the student's likeliest token that completes the text, or else continues it.

        Behind the text the teacher did not choose one of its longer tokens: ``2`` was likelier
        than ``24``, so that the student's ``24`` does not agree with it.

        Args:
            written: the beginning of the text, which earlier tokens have.
            excluded: texts that no token may begin with.
            sampled: the completion's token, which may continue the text, but not complete it: the
                row of its text is implausible.
        """
        completing = self._completing(position, written, text, excluded, sampled)
        if completing is not None:
            return completing
        for token_id, spelled in self._likely(position):
            longer = written + spelled
            if spelled and longer != text and text.startswith(longer):
                return token_id
        return None

    def _completing(
        self, position: int, written: bytes, text: bytes, excluded: tuple[bytes, ...], sampled: int
    ) -> int | None:
        """Return the student's likeliest token that completes the text, see ``_agreeing``."""
        for token_id, spelled in self._likely(position):
            longer = written + spelled
            is_other = token_id != sampled and not longer.startswith(excluded)
            if longer.startswith(text) and is_other:
                return token_id
        return None

    def _likely(self, position: int) -> Iterator[tuple[int, bytes]]:
        """Yield the student's likeliest ids at a position, in order, and their bytes."""
        assert self.rollout.student_topk_ids is not None  # kept for corrections
        for token_id in self.rollout.student_topk_ids[position].tolist():
            yield token_id, self.student.bytes_of(token_id) if token_id >= 0 else b""


def _comparable_bytes(student: TokenSequence, teacher: TokenSequence) -> int:
    """Return up to which byte both texts are the same, without a control token inside."""
    own, other = (np.frombuffer(side.text, dtype=np.uint8) for side in (student, teacher))
    controls = (int(side.byte_ends[at]) for side in (student, teacher) for at in side.marks)
    return min([common_prefix(own, other), *controls])
