"""``EndedTokens``: likely tokens of the teacher that end where a token of the student ends.

The completion continues with a longer token of the teacher instead: its `` range(2``, where it is
sure of `` range(``. No row of the completion has what follows the likely token; a lookahead does,
and is one more row of the boundary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.naming.decisions import Candidates
from mopd_losses.prefix.naming.names import CellNames
from mopd_losses.prefix.vocabulary.hashed_strings import Integers, indices_in_runs
from mopd_losses.prefix.vocabulary.marked_ranges import MarkedCell, ranges_of
from mopd_losses.prefix.vocabulary.marks import MarksTable
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary
from mopd_protocol.topk_logprobs import TopKLogprobs

Nats = NDArray[np.float64]


class EndedToken(NamedTuple):
    """A token, and the teacher's row behind it."""

    boundary: int
    row: int  # of the teacher
    token_id: int
    following: TopKLogprobs  # one row


@dataclass(frozen=True, eq=False)
class EndedTokens:
    """The tokens of several completions."""

    boundaries: Integers  # [tokens], ascending
    rows: Integers  # [tokens], of the teacher
    ids: Integers  # [tokens]
    following_ids: Integers  # [tokens, k], -1 for what is no token of the vocabulary
    following_nats: Nats  # [tokens, k], given the token; -inf for these

    @classmethod
    def of(cls, tokens: Sequence[EndedToken], vocabulary: SortedVocabulary) -> "EndedTokens":
        """Join tokens with rows of any width."""
        tokens = sorted(tokens, key=lambda token: token.boundary)
        width = max((token.following.k for token in tokens), default=0)
        ids = np.full((len(tokens), width), -1, dtype=np.int64)
        nats = np.full((len(tokens), width), -np.inf)
        for at, token in enumerate(tokens):
            ids[at, : token.following.k] = token.following.ids[0]
            nats[at, : token.following.k] = token.following.logprobs[0]
        known = (ids >= 0) & (ids < len(vocabulary.lengths))
        known &= vocabulary.lengths[np.where(known, ids, 0)] > 0
        boundaries, rows, own = (
            np.array([token[:3] for token in tokens], dtype=np.int64).reshape(-1, 3).T
        )
        return cls(boundaries, rows, own, np.where(known, ids, -1), np.where(known, nats, -np.inf))

    def __len__(self) -> int:
        return len(self.boundaries)

    def contain(self, boundaries: Integers, rows: Integers, ids: Integers) -> NDArray[np.bool_]:
        """Return whether tokens in rows are among these at their boundaries."""
        own = {*zip(self.boundaries.tolist(), self.rows.tolist(), self.ids.tolist(), strict=True)}
        at = np.flatnonzero(np.isin(boundaries, self.boundaries))
        columns = (column[at].tolist() for column in (boundaries, rows, ids))
        result = np.zeros(len(boundaries), dtype=np.bool_)
        result[at] = [each in own for each in zip(*columns, strict=True)]
        return result

    def candidates(
        self, shares: Nats, naming_share: float, detour_share: float
    ) -> tuple[Candidates, Nats]:
        """Return the likely tokens that follow, and their shares.

        Args:
            shares: [tokens, k], nats, of the teacher's mass at the boundary.
        """
        at = np.flatnonzero(shares >= np.log(naming_share))
        kept = shares.take(at)
        return Candidates(
            self.following_ids.take(at),
            np.zeros(len(at), dtype=np.int64),
            self.boundaries[at // max(shares.shape[1], 1)],
            kept >= np.log(detour_share),
        ), kept

    def cell_masses(
        self, names: CellNames, nats: Nats, vocabulary: SortedVocabulary, marks: MarksTable
    ) -> Nats:
        """[cells], nats: the tokens that follow and continue with each cell.

        Args:
            nats: [tokens, k], of the tokens that follow.
            vocabulary: the teacher's.
        """
        results = np.full(len(names.boundaries), -np.inf)
        first = np.searchsorted(names.boundaries, [self.boundaries, self.boundaries + 1])
        owners, cells = indices_in_runs(*first)
        sought = [
            MarkedCell("", names.texts.string(cell), marks.marks_of(int(names.marks[cell])))
            for cell in cells.tolist()
        ]
        starts, stops, counts = ranges_of(vocabulary, sought)
        owners, cells = np.repeat(owners, counts), np.repeat(cells, counts)
        known = self.following_ids >= 0
        ranks = np.where(known, vocabulary.ranks[np.where(known, self.following_ids, 0)], -1)
        inside = (ranks[owners] >= starts[:, None]) & (ranks[owners] < stops[:, None])
        at, columns = np.nonzero(inside)
        np.logaddexp.at(results, cells[at], nats[owners[at], columns])
        return results
