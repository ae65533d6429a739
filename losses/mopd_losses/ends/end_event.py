"""``EndEvent``: the end of a turn as one event of a student and a teacher.

A base model ends with ``<|endoftext|>`` and an instruct model of the same vocabulary with
``<|im_end|>``; Llama 3, Gemma and Qwen have several such tokens each. Losses compare ids, and would
teach a student a token that does not end its completions. So before a loss reads a teacher's score,
and while it reads the student's rows (``one_end_rows``),

    t(end) = sum of t over all ids that end the teacher's completions
    p(end) = sum of p over all ids that end the student's

are each under one id, and the other ids that end have no probability. With one vocabulary, the
score is in the student's ids after that; ``ControlTokens`` has the ids that are ordinary on one
side.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from mopd_losses.core.loss import AlignedPair
from mopd_losses.projection.control_tokens import ControlTokens
from mopd_protocol.arrays import IntArray
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs

Nats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class KnownEnds:
    """A teacher's mass of the end, by row of a score: from ``known`` to ``known + most``.

    An end outside a top-k is no likelier than the last entry, and its mass is in the tail.
    """

    known: Nats  # [rows], nats
    most: Nats  # [rows], nats; -inf where all ends are known, or none


@dataclass(frozen=True, eq=False)
class EndEvent:
    """The ids that end the completions of either side.

    Args:
        renamed: teacher id -> id in its place, for all ids that end and others that change.
    """

    student_ids: tuple[int, ...]  # the first one represents them
    teacher_ids: tuple[int, ...]
    end: int  # the event's id in a renamed score
    renamed: Mapping[int, int]

    @classmethod
    def between(
        cls, student: TokenTable, teacher: TokenTable, *, one_vocabulary: bool
    ) -> "EndEvent | None":
        """Return the event; None if a side has no end, or nothing is to be renamed or summed.

        Args:
            one_vocabulary: losses compare equal ids; if not, a projection connects them.
        """
        controls = ControlTokens.of(student, teacher)
        own, others = controls.student_ends, controls.teacher_ends
        if not own or not others:
            return None
        end = own[0] if one_vocabulary else others[0]
        renamed = dict.fromkeys(others, end)
        if one_vocabulary:
            renamed |= {j: v for v, j in controls.ordinary.items() if v != j}
        needed = len(own) > 1 or any(j != v for j, v in renamed.items())
        return cls(own, others, end, renamed) if needed else None

    def of(self, pair: AlignedPair) -> tuple[AlignedPair, KnownEnds]:
        """Rename a completion and its score; also return what the score contains of the end."""
        completion, student = pair.score.completion, pair.student
        topk, ends = self._scores(pair.score.topk, completion.token_ids)
        own_ids = np.where(
            np.isin(student.token_ids, self.student_ids), self.student_ids[0], student.token_ids
        )
        ids, nats = self._renamed(completion.token_ids), topk.token_logprobs.copy()
        # An ordinary token of the student that only ends completions for the teacher.
        starts, rows = pair.alignment.student_starts, pair.alignment.teacher_starts
        is_ordinary = ~np.isin(student.token_ids[starts], self.student_ids)
        is_ordinary &= np.isin(completion.token_ids[rows], self.teacher_ids)
        ids[rows[is_ordinary]] = student.token_ids[starts[is_ordinary]]
        nats[rows[is_ordinary]] = -np.inf
        score = replace(
            pair.score,
            completion=_with_ids(completion, ids),
            topk=replace(topk, token_logprobs=nats),
        )
        return replace(pair, student=_with_ids(student, own_ids), score=score), ends

    def teacher_rows(self, logprobs: Float[Tensor, "rows ids"]) -> Float[Tensor, "rows ids"]:
        """Rename complete rows of a teacher with the student's vocabulary; changes its argument.

        Ordinary tokens of the student that the teacher ends with have no probability; they get
        that of the least likely id, for a finite divergence.
        """
        merged = {
            target: logprobs[:, [j for j, v in self.renamed.items() if v == target]].logsumexp(1)
            for target in self.renamed.values()
        }
        least = logprobs.masked_fill(torch.isneginf(logprobs), torch.inf).amin(dim=1)
        for emptied in self.renamed:
            logprobs[:, emptied] = least
        logprobs[:, list(self.student_ids)] = -torch.inf
        for target, values in merged.items():
            logprobs[:, target] = values
        return logprobs

    def _scores(self, topk: TopKLogprobs, tokens: IntArray) -> tuple[TopKLogprobs, KnownEnds]:
        """Return a renamed top-k, whose token logprobs are those of the event where it occurs."""
        logprobs, tails = topk.logprobs.astype(np.float64), topk.tail_logprobs.astype(np.float64)
        own = topk.token_logprobs.astype(np.float64)
        is_end, ends_turn = np.isin(topk.ids, self.teacher_ids), np.isin(tokens, self.teacher_ids)
        is_own = topk.ids == tokens[:, None]
        with np.errstate(divide="ignore"):
            entries = np.log(np.where(is_end, np.exp(logprobs), 0.0).sum(axis=1))
            others = np.log(np.where(is_end & ~is_own, np.exp(logprobs), 0.0).sum(axis=1))
            known = np.where(ends_turn, np.logaddexp(own, others), entries)
            # An entry that lacks the completion's own token gets its mass from the tail.
            lacks = ends_turn & is_end.any(axis=1) & ~is_own.any(axis=1)
            left = np.log(np.maximum(np.exp(tails) - np.exp(own), 0.0))
        missing = len(self.teacher_ids) - (is_end & ~is_own).sum(axis=1) - ends_turn
        ids, nats = _with_one_end(self._renamed(topk.ids), logprobs, is_end, known)
        tails = np.where(lacks, left, tails)
        own = np.where(ends_turn, np.minimum(known, 0.0), own)
        most = _most(nats, tails, np.where(np.isneginf(known), 0, missing))
        nats, own, tails = (each.astype(np.float32) for each in (nats, own, tails))
        return TopKLogprobs(ids, nats, own, tails), KnownEnds(known, most)

    def _renamed(self, ids: IntArray) -> IntArray:
        renamed = ids.copy()
        for teacher_id, place in self.renamed.items():
            renamed[ids == teacher_id] = place
        return renamed


def _with_one_end(
    ids: IntArray, logprobs: Nats, is_end: NDArray[np.bool_], known: Nats
) -> tuple[IntArray, Nats]:
    """Keep one entry of the end in each row that has any, with its mass; most likely first."""
    rows = np.flatnonzero(is_end.any(axis=1))
    first = is_end[rows].argmax(axis=1)
    ends, nats = ids[rows, first], np.minimum(known[rows], 0.0)
    ids, logprobs = np.where(is_end, ABSENT_ID, ids), np.where(is_end, -np.inf, logprobs)
    ids[rows, first], logprobs[rows, first] = ends, nats
    order = np.argsort(-logprobs[rows], axis=1, kind="stable")
    ids[rows] = np.take_along_axis(ids[rows], order, axis=1)
    logprobs[rows] = np.take_along_axis(logprobs[rows], order, axis=1)
    return ids, logprobs


def _most(logprobs: Nats, tails: Nats, missing: NDArray[np.int64]) -> Nats:
    """[rows], the most mass that missing ends may have, nats."""
    finite = np.where(np.isneginf(logprobs), np.inf, logprobs)
    last = finite.min(axis=1, initial=np.inf)
    with np.errstate(divide="ignore"):
        return np.where(
            missing > 0, np.minimum(last + np.log(np.maximum(missing, 1)), tails), -np.inf
        )


def _with_ids(sequence: TokenSequence, ids: NDArray[np.integer]) -> TokenSequence:
    return TokenSequence(ids.astype(np.int32), sequence.byte_ends, sequence.text, sequence.marks)
