"""``StudentCompletion``: the part of a sequence of the student's ids that a teacher scores."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.arrays import IntArray
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TokenTable


@dataclass(frozen=True, eq=False)
class StudentCompletion:
    """A completion, and where its tokens are among the ids of a request.

    It ends with its first ending token; ids behind are not scored. Ids without a token (of a padded
    head) spell nothing.
    """

    sequence: TokenSequence
    positions: NDArray[np.int64]  # [tokens], of each token among the ids
    start: int  # first position behind the prompt

    @classmethod
    def of(cls, ids: Sequence[int], start: int, table: TokenTable) -> "StudentCompletion":
        """Return the completion that begins at ``start``."""
        completion = np.asarray(ids[start:], dtype=np.int64)
        ends = np.flatnonzero(np.isin(completion, table.roles.ending))
        stop = int(ends[0]) + 1 if len(ends) else len(completion)
        inside = completion[:stop] < table.size
        known = inside & table.present[np.where(inside, completion[:stop], 0)]
        positions = np.flatnonzero(known)
        return cls(table.sequence(completion[positions]), positions + start, start)

    def rows(self, count: int) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return the row of each position of ``count`` ids, -1 without one, and whether the
        position's token has no text.

        What follows the text before an id without a token is what the next token's row predicts.
        """
        rows = np.full(count, -1, dtype=np.int32)
        textless = np.zeros(count, dtype=np.bool_)
        if len(self.positions):
            scored = np.arange(self.start, self.positions[-1] + 1)
            rows[scored] = np.searchsorted(self.positions, scored)
            textless[scored] = True
            textless[self.positions] = False
        return rows, textless


def first_tokens(sequence: TokenSequence, count: int) -> TokenSequence:
    """Return the first tokens of a sequence."""
    if count == len(sequence):
        return sequence
    ends = sequence.byte_ends[:count]
    return TokenSequence(
        token_ids=sequence.token_ids[:count],
        byte_ends=ends,
        text=sequence.text[: int(ends[-1]) if count else 0],
        marks={position: mark for position, mark in sequence.marks.items() if position < count},
    )
