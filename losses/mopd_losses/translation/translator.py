"""``Translator``: the scores of one teacher in the ids of one student."""

from collections.abc import Mapping, Sequence
from threading import Lock

import numpy as np

from mopd_losses.alignment.byte_strings import control_characters
from mopd_losses.translation.branches import BranchTree
from mopd_losses.translation.first_tokens import FirstTokens
from mopd_losses.translation.masses import Probabilities
from mopd_losses.translation.scored_texts import ScoredTexts
from mopd_losses.translation.texts import Texts
from mopd_losses.translation.translation import Coverage, ExtraRow, Translation
from mopd_losses.translation.vocabulary import Vocabulary
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs

#: Texts in memory; beyond, all are discarded and computed again.
_MOST_TEXTS = 500_000


class Translator:
    """Translate between two tokenizers, whose results are cached."""

    def __init__(
        self,
        student: TokenTable,
        student_encoder: TextEncoder,
        teacher: TokenTable,
        teacher_encoder: TextEncoder,
    ) -> None:
        controls = control_characters(student, teacher)
        self._student = Vocabulary(student, student_encoder, controls)
        self._teacher = Vocabulary(teacher, teacher_encoder, controls)
        self._first_tokens = FirstTokens(self._student, self._teacher)
        self._texts = self._no_texts()
        self._lock = Lock()  # services translate in several threads
        self._is_one_tokenizer = student.fingerprint == teacher.fingerprint

    def _no_texts(self) -> Texts:
        return Texts(self._student, self._teacher, self._first_tokens)

    def begin(
        self, completions: Sequence[TokenSequence], scores: Sequence[TeacherScore]
    ) -> "PendingTranslation":
        """Translate scores as far as their own rows decide them.

        Args:
            completions: in the student's tokens, one for each score.
        """
        own: dict[int, Translation] = {}
        others: list[int] = []
        for index, (completion, score) in enumerate(zip(completions, scores, strict=True)):
            if self._is_one_tokenizer and np.array_equal(completion.token_ids, score.token_ids):
                own[index] = _own_score(score.topk)
            else:
                others.append(index)
        sides = self._student, self._teacher
        scored = ScoredTexts(
            sides, [completions[each] for each in others], [scores[each] for each in others]
        )
        with self._lock:
            if len(self._texts) > _MOST_TEXTS:
                self._texts = self._no_texts()
            tree = BranchTree(sides, self._texts, scored, others)
        return PendingTranslation(tree, own, others, self._lock)


class PendingTranslation:
    """Scores whose translation continues with the rows that it requests."""

    def __init__(
        self, tree: BranchTree, own: Mapping[int, Translation], others: Sequence[int], lock: Lock
    ) -> None:
        self._tree = tree
        self._own = own  # completion -> a score that is in the student's tokens already
        self._others = others
        self._lock = lock

    @property
    def extra_rows(self) -> list[ExtraRow]:
        """Rows without which likely text stays in the tail; empty if nothing is missing."""
        return self._tree.extra_rows

    def add(self, rows: Mapping[ExtraRow, TopKLogprobs]) -> None:
        """Continue with requested rows, one ``TopKLogprobs`` of one row for each."""
        with self._lock:
            self._tree.add(rows)

    def translations(self) -> list[Translation]:
        """Return the translation of each completion."""
        student = self._tree.scored.student
        computed = self._tree.probabilities()
        translations = dict(self._own)
        for index, first, count in zip(
            self._others, student.first.tolist(), student.counts.tolist(), strict=True
        ):
            ids = np.array(student.ids[first : first + count], dtype=np.int64)
            events = self._tree.scored.events[first : first + count]
            translations[index] = _translation(computed, first, ids, events)
        return [translations[index] for index in range(len(translations))]


def _own_score(topk: TopKLogprobs) -> Translation:
    masses = np.exp(topk.logprobs.astype(np.float64)).sum(axis=1).astype(np.float32)
    none = np.zeros(len(topk), dtype=np.bool_)
    return Translation(topk, Coverage(masses, none, ~none))


def _translation(
    computed: Probabilities, first: int, realised: np.ndarray, events: np.ndarray
) -> Translation:
    """Return the rows of one completion.

    Args:
        first: position of its first token.
        realised: [tokens], the student's.
        events: [tokens], those that stand for these.
    """
    count = len(realised)
    own = slice(*np.searchsorted(computed.positions, [first, first + count]))
    rows, tokens = computed.positions[own] - first, computed.tokens[own]
    counts = np.bincount(rows, minlength=count)
    columns = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    width = int(counts.max(initial=0))
    ids = np.full((count, width), ABSENT_ID, dtype=np.int32)
    logprobs = np.full((count, width), -np.inf, dtype=np.float32)
    ids[rows, columns] = np.where(tokens == events[rows], realised[rows], tokens)
    logprobs[rows, columns] = np.log(computed.probabilities[own])
    masses = np.exp(logprobs.astype(np.float64)).sum(axis=1)
    with np.errstate(divide="ignore"):
        tails = np.log(np.clip(1.0 - masses, 0.0, None))
        nats = np.log(computed.realised[first : first + count])
    lost = computed.lost[first : first + count]
    coverage = Coverage(masses.astype(np.float32), lost, masses > 0)
    return Translation(TopKLogprobs(ids, logprobs, nats, tails), coverage)
