"""``BranchTree``: what a teacher may write at each position of a student, with its mass."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mopd_losses.translation.first_tokens import UNDECIDED
from mopd_losses.translation.masses import Masses, Probabilities
from mopd_losses.translation.rows import Floats, Integers, Rows
from mopd_losses.translation.scored_texts import ScoredTexts
from mopd_losses.translation.texts import BEFORE, IMPOSSIBLE, UNKNOWN, Texts
from mopd_losses.translation.translation import ExtraRow
from mopd_losses.translation.vocabulary import Vocabulary
from mopd_protocol.topk_logprobs import TopKLogprobs

#: Shares of a position's mass: text below the first is part of the tail; from the second on, many
#: continuations are tried; from the third on, an extra row is requested.
LEAST_SHARE, MANY_SHARE, EXTRA_ROW_SHARE = 3e-5, 0.02, 0.05

#: Tokens of the teacher in succession that are requested for one token of the student.
_MOST_TOKENS = 8

#: In place of a token: there is none behind the realised ones.
_REALISED = -1


class Branches(NamedTuple):
    """Beginnings of the teacher's tokens, one an element: realised tokens, and others behind."""

    positions: Integers
    rows: Integers  # behind the realised tokens
    paths: Integers  # number of the other tokens but the last
    tokens: Integers  # the last of the other tokens, or ``_REALISED`` if there are none
    texts: Integers  # what the tokens spell, see ``Texts``
    sets: Integers  # the student's first tokens, see ``Texts.sets``
    masses: Floats

    def selected(self, selected: NDArray[np.bool_] | Integers) -> "Branches":
        """Return some branches."""
        return Branches._make(column[selected] for column in self)


class BranchTree:
    """Branches from all positions of completions, as far as rows are known.

    Args:
        sides: student and teacher.
        completions: index of each completion, which extra rows name.
    """

    def __init__(
        self,
        sides: tuple[Vocabulary, Vocabulary],
        texts: Texts,
        scored: ScoredTexts,
        completions: Sequence[int],
    ) -> None:
        self._student, self._teacher = sides
        self._texts, self.scored = texts, scored
        self._completions = completions
        self._masses = Masses(scored.events, self._student.size)
        self._paths: dict[tuple[int, ...], int] = {(): 0}
        self._path_ids: list[tuple[int, ...]] = [()]
        self._branches = [Branches._make([*[np.zeros(0, dtype=np.int64)] * 6, np.zeros(0)])]
        children = self._roots()
        while len(children.positions):
            self._decide(children)
            newest = self._branches[-1]
            numbers = scored.student.completions[newest.positions]
            has_row = (newest.tokens == _REALISED) & (newest.rows < scored.row_ends[numbers])
            self._branches[-1] = newest.selected(~has_row)
            parents = newest.selected(has_row)
            children = self._children(parents, parents.rows, scored.rows)

    @property
    def _undecided(self) -> Branches:
        """Branches whose first token is not certain."""
        if len(self._branches) > 1:
            columns = zip(*self._branches, strict=True)
            self._branches = [Branches._make(map(np.concatenate, columns))]
        return self._branches[0]

    @property
    def extra_rows(self) -> list[ExtraRow]:
        """Rows without which likely text stays in the tail."""
        undecided = self._undecided
        likely = undecided.masses >= EXTRA_ROW_SHARE * self._masses.totals[undecided.positions]
        likely_at = np.flatnonzero(likely & (undecided.tokens != _REALISED))
        likely_at = likely_at[np.argsort(undecided.positions[likely_at], kind="stable")]
        rows = (self._extra_row(undecided, at) for at in likely_at.tolist())
        return [*dict.fromkeys(row for row in rows if len(row.token_ids) <= _MOST_TOKENS)]

    def _extra_row(self, branches: Branches, at: int) -> ExtraRow:
        """Return the row behind the tokens of a branch."""
        row = int(branches.rows[at])
        number = int(self.scored.student.completions[branches.positions[at]])
        first = int(self.scored.teacher.first[number])
        return ExtraRow(self._completions[number], row - first, self._ids(branches, at))

    def add(self, rows: Mapping[ExtraRow, TopKLogprobs]) -> None:
        """Continue with extra rows."""
        numbers = {index: number for number, index in enumerate(self._completions)}
        requested = [
            (int(self.scored.teacher.first[numbers[row.completion]]) + row.teacher_tokens, row)
            for row in rows
        ]
        candidates = Rows([(topk, None) for topk in rows.values()], self._teacher.size)
        while True:
            undecided = self._undecided
            known = {
                self._key(row, self._paths[extra.token_ids[:-1]], extra.token_ids[-1]): number
                for number, (row, extra) in enumerate(requested)
                if extra.token_ids and extra.token_ids[:-1] in self._paths
            }
            keys = self._key(undecided.rows, undecided.paths, undecided.tokens)
            available = np.isin(keys, np.array([*known], dtype=np.int64))
            available &= undecided.tokens != _REALISED
            if not available.any():
                break
            self._branches = [undecided.selected(~available)]
            which = np.array([known[key] for key in keys[available].tolist()], dtype=np.int64)
            self._decide(self._children(undecided.selected(available), which, candidates))

    def _key(self, rows: Any, paths: Any, tokens: Any) -> Any:
        return (rows * len(self._paths) + paths) * self._teacher.size + tokens

    def probabilities(self) -> Probabilities:
        """Return what is known of all positions."""
        return self._masses.probabilities(self._undecided, self._texts.members)

    def _roots(self) -> Branches:
        """Return what may follow the student's prefixes, from all rows that are open at them."""
        scored, teacher = self.scored, self._teacher
        positions, rows, last = scored.open_rows()
        offsets, starts = scored.student.starts[positions], scored.teacher.starts[rows]
        is_level = starts == offsets
        paths = np.exp(scored.nats_before[rows] - scored.nats_before[last])
        self._masses.reach(positions[is_level], (paths * scored.rows.tails[rows])[is_level])
        before = [
            scored.student.strings[number][start:offset]
            for number, start, offset in zip(
                scored.student.completions[positions].tolist(),
                starts.tolist(),
                offsets.tolist(),
                strict=True,
            )
        ]
        which, candidates = scored.rows.candidates(rows)
        tokens = scored.rows.tokens[candidates]
        masses = paths[which] * scored.rows.probabilities[candidates]
        realised = tokens == np.array(scored.teacher.ids, dtype=np.int64)[rows][which]
        lengths, level = teacher.lengths[tokens], is_level[which]
        begins, ends = self._beyond(before, which, tokens, lengths)
        ends &= ~realised & ~level
        begins |= level
        self._masses.reach(positions[which][begins], masses[begins])
        kept = np.flatnonzero((begins & (lengths > 0)) | ends)
        which, tokens, realised = which[kept], tokens[kept], realised[kept]
        return Branches(
            positions[which],
            rows[which] + realised,
            np.zeros(len(kept), dtype=np.int64),
            np.where(realised, _REALISED, tokens),
            self._texts.longer(
                self._contexts(positions, rows, is_level, before, which, tokens), tokens
            ),
            np.full(len(kept), UNKNOWN, dtype=np.int64),
            masses[kept],
        )

    def _beyond(
        self, before: list[str], which: Integers, tokens: Integers, lengths: Integers
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return whether tokens of rows begin with all text between row and position and are
        longer, and whether it begins with them."""
        teacher = self._teacher
        known = {each: teacher.ranks_behind(each) if each else (0, 0) for each in {*before}}
        ranges = np.array([known[each] for each in before], dtype=np.int64).reshape(-1, 2)
        sizes = np.array([*map(len, before)], dtype=np.int64)
        ranks = teacher.ranks[tokens]
        inside = (ranks >= ranges[which, 0]) & (ranks < ranges[which, 1])
        begins = inside & (lengths > sizes[which])
        prefixes = {each: teacher.beginnings(each) for each in {*before}}
        step = teacher.size + 1
        keys = [at * step + token for at, each in enumerate(before) for token in prefixes[each]]
        ends = (lengths > 0) & (lengths <= sizes[which])
        short = np.flatnonzero(ends)
        ends[short] = np.isin(which[short] * step + tokens[short], np.array(keys, dtype=np.int64))
        return begins, ends

    def _contexts(
        self,
        positions: Integers,
        rows: Integers,
        is_level: NDArray[np.bool_],
        before: list[str],
        which: Integers,
        tokens: Integers,
    ) -> Integers:
        """Return the context of each token: what is before it as far as it may be joined."""
        scored = self.scored
        sizes = np.array([*map(len, before)], dtype=np.int64)[which]
        inside = self._teacher.lengths[tokens] > sizes
        codes = self._teacher.codes_at(tokens, np.where(inside, sizes, 0))
        own = self._student.joinable[scored.student.codes_before[positions][which], codes]
        own |= ~inside  # the first character is not known
        other = np.where(
            is_level[which],
            self._teacher.joinable[scored.teacher.codes_before[rows][which], codes],
            scored.teacher.joined[rows][which],
        )
        keys, inverse = np.unique(4 * which + 2 * own + other, return_inverse=True)
        contexts = [
            self._texts.context(
                scored.student_before(position) if key & 2 else (),
                scored.teacher_before(row) if key & 1 else (),
                before[key >> 2],
            )
            for key, position, row in zip(
                keys.tolist(), positions[keys >> 2].tolist(), rows[keys >> 2].tolist(), strict=True
            )
        ]
        return np.array(contexts, dtype=np.int64)[inverse]

    def _decide(self, branches: Branches) -> None:
        """Add branches to the masses where the student's first token is certain, and others that
        the teacher's tokenizer may write to the undecided ones."""
        reached = self._masses.reached[branches.positions]
        likely = branches.masses >= LEAST_SHARE * reached  # others are part of the tail
        branches, reached = branches.selected(likely), reached[likely]
        sets = self._texts.sets(branches.texts, branches.masses >= MANY_SHARE * reached)
        tokens = self._texts.certain(sets)
        certain = tokens != UNDECIDED
        decided = branches.selected(certain)
        self._masses.add(decided.positions, tokens[certain], decided.masses)
        others = np.flatnonzero(~certain & (sets != IMPOSSIBLE))
        others = others[np.argsort(sets[others] == BEFORE, kind="stable")]
        self._branches.append(branches.selected(others)._replace(sets=sets[others]))

    def _children(self, parents: Branches, numbers: Integers, rows: Rows) -> Branches:
        """Return branches with each token that may follow; the rest of the row is tail. Those whose
        first token is certain because of their end are added to the masses.

        Args:
            numbers: of each branch's row among ``rows``.
        """
        which, candidates = rows.candidates(numbers)
        tokens = rows.tokens[candidates]
        masses = parents.masses[which] * rows.probabilities[candidates]
        kept = self._teacher.lengths[tokens] > 0
        begun = self._texts.begun(parents.texts)[which]
        begins = np.zeros(len(which), dtype=np.bool_)
        for at in np.flatnonzero(kept & ~begun).tolist():
            missing = self._texts.missing(int(parents.texts[which[at]]))
            string = self._teacher.strings[tokens[at]]
            kept[at] = string.startswith(missing) or missing.startswith(string)
            begins[at] = kept[at] and len(string) > len(missing)
        self._masses.reach(parents.positions[which[begins]], masses[begins])
        ended = np.flatnonzero(kept & begun)
        first = self._texts.tokens_if_ended(
            parents.texts[which[ended]], self._teacher.codes_at(tokens[ended], 0)
        )
        ended, first = ended[first != UNDECIDED], first[first != UNDECIDED]
        kept[ended] = False
        positions = parents.positions[which[ended]]
        likely = masses[ended] >= LEAST_SHARE * self._masses.reached[positions]
        self._masses.add(positions[likely], first[likely], masses[ended[likely]])
        which, tokens, masses = which[kept], tokens[kept], masses[kept]
        follows = parents.tokens == _REALISED
        expected = np.array([*self.scored.teacher.ids, _REALISED], dtype=np.int64)
        realised = tokens == np.where(follows, expected[parents.rows * follows], _REALISED)[which]
        paths = [self._path(self._ids(parents, at)) for at in range(len(follows))]
        return Branches(
            parents.positions[which],
            parents.rows[which] + realised,
            np.array(paths, dtype=np.int64)[which],
            np.where(realised, _REALISED, tokens),
            self._texts.longer(parents.texts[which], tokens),
            parents.sets[which],
            masses,
        )

    def _ids(self, branches: Branches, at: int) -> tuple[int, ...]:
        """Return a branch's tokens behind the realised ones."""
        token = int(branches.tokens[at])
        return () if token == _REALISED else (*self._path_ids[int(branches.paths[at])], token)

    def _path(self, token_ids: tuple[int, ...]) -> int:
        """Return the number of tokens behind realised ones."""
        if token_ids not in self._paths:
            self._paths[token_ids] = len(self._path_ids)
            self._path_ids.append(token_ids)
        return self._paths[token_ids]
