"""``Translator``: the scores of one teacher in the ids of one student."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from mopd_losses.alignment.byte_strings import control_characters
from mopd_losses.translation.branches import Branch, Position
from mopd_losses.translation.first_tokens import Beginning, Division, FirstTokens
from mopd_losses.translation.scored_text import Row, ScoredText
from mopd_losses.translation.translation import Coverage, ExtraRow, Translation
from mopd_losses.translation.vocabulary import Vocabulary
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs

#: Probability by which a named entry may be wrong.
TOLERANCE = 1e-4

#: Shares of a position's mass: text below the first is part of the tail; from the second on, many
#: continuations are tried; from the third on, an extra row is requested.
LEAST_SHARE, MANY_SHARE, EXTRA_ROW_SHARE = 3e-5, 0.02, 0.05

#: Rows before a position whose tokens may reach beyond it.
_MOST_ROWS_BEFORE = 8

#: Tokens of the teacher in succession that are requested for one token of the student.
_MOST_TOKENS = 8


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
        self._is_one_tokenizer = student.fingerprint == teacher.fingerprint

    def begin(
        self, completions: Sequence[TokenSequence], scores: Sequence[TeacherScore]
    ) -> "PendingTranslation":
        """Translate scores as far as their own rows decide them.

        Args:
            completions: in the student's tokens, one for each score.
        """
        sides = self._student, self._teacher
        positions: list[list[Position]] = []
        own: dict[int, Translation] = {}
        for index, (completion, score) in enumerate(zip(completions, scores, strict=True)):
            if self._is_one_tokenizer and np.array_equal(completion.token_ids, score.token_ids):
                own[index] = _own_score(score.topk)
                positions.append([])
                continue
            text = ScoredText(index, sides, completion, score)
            positions.append([Position(text, number) for number in range(len(completion))])
        roots = [each for position in chain(*positions) for each in self._roots(position)]
        self._decide(roots, {})
        return PendingTranslation(positions, own, self._decide)

    def _decide(self, branches: Sequence[Branch], known: Mapping[ExtraRow, TopKLogprobs]) -> None:
        """Add branches to their positions: to the mass of a token where it is certain, and where it
        is not, what follows them, as far as rows are known."""
        while branches:
            following: list[Branch] = []
            for branch in self._possible(branches):
                position = branch.position
                if branch.token is not None:
                    position.masses[branch.token] += branch.mass
                    continue
                row = _row_behind(branch, known)
                if row is None:
                    position.undecided.append(branch)
                    continue
                following += self._children(branch, row)
            branches = following

    def _roots(self, position: Position) -> Iterator[Branch]:
        """Yield what may follow a student's prefix, from all rows that are open at it."""
        text, offset = position.text, position.offset
        last = text.covering_row(offset)
        if last is None:
            return
        for row in range(self._first_open_row(text, offset, last), last + 1):
            start = text.teacher_starts[row]
            before = text.string[start:offset]
            path = math.exp(text.nats_before[row] - text.nats_before[last])
            candidates = text.row(row)
            assert candidates is not None
            if start == offset:
                position.reached += path * candidates.tail
            for token, probability in zip(candidates.ids, candidates.probabilities, strict=True):
                string = self._teacher.string(token)
                realised = token == text.teacher_ids[row]
                mass = path * probability
                if not string and start == offset:
                    position.reached += mass
                elif len(string) > len(before):
                    if string.startswith(before):
                        position.reached += mass
                        at = (row + 1, ()) if realised else (row, (token,))
                        yield Branch(position, *at, string[len(before) :], "", mass)
                elif string and not realised and before.startswith(string):
                    yield Branch(position, row, (token,), "", before[len(string) :], mass)

    def _first_open_row(self, text: ScoredText, offset: int, last: int) -> int:
        """Return the first row of which a token may reach beyond an offset."""
        first = last
        while first and last - first < _MOST_ROWS_BEFORE:
            start = text.teacher_starts[first]
            if start < offset and not self._teacher.joins(*text.string[start - 1 : start + 1]):
                break
            first -= 1
        return first

    def _possible(self, branches: Sequence[Branch]) -> Iterator[Branch]:
        """Yield branches that the teacher's tokenizer may write, with what the student may write
        first."""
        trials: list[tuple[Branch, tuple[Beginning, bool]]] = []
        divisions: list[tuple[Branch, Division]] = []
        for branch in branches:
            position, text = branch.position, branch.position.text
            if branch.mass < LEAST_SHARE * position.reached:
                continue  # part of the tail
            written = text.written(branch.row, branch.ids, position.offset, branch.text)
            if branch.text:
                before = text.student_before(position.number, branch.text[0])
                beginning = Beginning(before, branch.text, written)
                trials.append((branch, (beginning, branch.mass >= MANY_SHARE * position.reached)))
            else:
                divisions.append((branch, Division(written, branch.missing)))
        tokens = self._first_tokens.of(trial for _, trial in trials)
        for branch, trial in trials:
            branch.tokens = tokens[trial]
            yield branch
        possible = self._first_tokens.may_write(key for _, key in divisions)
        yield from (branch for branch, division in divisions if possible[division])

    def _children(self, branch: Branch, row: Row) -> Iterator[Branch]:
        """Yield a branch with each token that may follow; the rest of the row is tail."""
        position = branch.position
        realised = None if branch.ids else position.text.teacher_ids[branch.row]
        for token, probability in zip(row.ids, row.probabilities, strict=True):
            string = self._teacher.string(token)
            mass = branch.mass * probability
            missing = branch.missing
            if string and (string.startswith(missing) or missing.startswith(string)):
                at = (
                    (branch.row + 1, ())
                    if token == realised
                    else (branch.row, (*branch.ids, token))
                )
                behind = branch.text + string[len(missing) :]
                if behind and not branch.text:
                    position.reached += mass
                yield Branch(position, *at, behind, missing[len(string) :], mass)


class PendingTranslation:
    """Scores whose translation continues with the rows that it requests."""

    def __init__(
        self,
        positions: Sequence[Sequence[Position]],
        own: Mapping[int, Translation],
        decide: Callable[[Sequence[Branch], Mapping[ExtraRow, TopKLogprobs]], None],
    ) -> None:
        self._positions = positions
        self._own = own  # completion -> a score that is in the student's tokens already
        self._decide = decide

    @property
    def extra_rows(self) -> list[ExtraRow]:
        """Rows without which likely text stays in the tail; empty if nothing is missing."""
        missing = (
            branch.extra_row
            for position in chain(*self._positions)
            for branch in position.undecided
            if branch.mass >= EXTRA_ROW_SHARE * position.total
            and 0 < len(branch.ids) <= _MOST_TOKENS
        )
        return [*dict.fromkeys(missing)]

    def add(self, rows: Mapping[ExtraRow, TopKLogprobs]) -> None:
        """Continue with requested rows, one ``TopKLogprobs`` of one row for each."""
        branches: list[Branch] = []
        for position in chain(*self._positions):
            undecided = position.undecided
            position.undecided = [each for each in undecided if each.extra_row not in rows]
            branches += [each for each in undecided if each.extra_row in rows]
        self._decide(branches, rows)

    def translations(self) -> list[Translation]:
        """Return the translation of each completion."""
        return [
            self._own[index] if index in self._own else _translation(positions)
            for index, positions in enumerate(self._positions)
        ]


def _row_behind(branch: Branch, known: Mapping[ExtraRow, TopKLogprobs]) -> Row | None:
    if not branch.ids:
        return branch.position.text.row(branch.row)
    row = known.get(branch.extra_row)
    return None if row is None else Row.of(row, 0)


def _own_score(topk: TopKLogprobs) -> Translation:
    masses = np.exp(topk.logprobs.astype(np.float64)).sum(axis=1).astype(np.float32)
    none = np.zeros(len(topk), dtype=np.bool_)
    return Translation(topk, Coverage(masses, none, ~none))


def _translation(positions: Sequence[Position]) -> Translation:
    named = [position.certain(TOLERANCE) for position in positions]
    width = max(map(len, named), default=0)
    ids = np.full((len(named), width), ABSENT_ID, dtype=np.int32)
    logprobs = np.full((len(named), width), -np.inf, dtype=np.float32)
    for row, entries in enumerate(named):
        ranked = sorted(entries.items(), key=lambda entry: (-entry[1], entry[0]))
        ids[row, : len(ranked)] = [token for token, _ in ranked]
        with np.errstate(divide="ignore"):
            logprobs[row, : len(ranked)] = np.log([mass for _, mass in ranked])
    ids[np.isneginf(logprobs)] = ABSENT_ID
    masses = np.exp(logprobs.astype(np.float64)).sum(axis=1)
    with np.errstate(divide="ignore"):
        tails = np.log(np.clip(1.0 - masses, 0.0, None))
        realised = np.log([position.realised for position in positions])
    lost = [position.is_lost(entries) for position, entries in zip(positions, named, strict=True)]
    coverage = Coverage(masses.astype(np.float32), np.array(lost, dtype=np.bool_), masses > 0)
    return Translation(TopKLogprobs(ids, logprobs, realised, tails), coverage)
