"""``BoundingTokens``: tokens whose mass is an upper bound of what is missing of cells."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.naming.nested_names import Names
from mopd_losses.prefix.text.strings import Strings
from mopd_losses.prefix.vocabulary.hashed_strings import Integers

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class BoundingTokens:
    """Bounding tokens of cells on one side; a boundary lists each token once."""

    cells: Flags  # [cells], whether a cell has a bounding token
    boundaries: Integers  # [bounding tokens], ascending
    rows: Integers  # [bounding tokens]
    ids: Integers  # [bounding tokens]
    counted: Flags  # [bounding tokens], whether the token is mass of what is open

    @classmethod
    def none(cls, cells: int) -> "BoundingTokens":
        """Return no bounding tokens of so many cells."""
        nothing, flags = np.empty(0, dtype=np.int64), np.zeros(cells, dtype=np.bool_)
        return cls(flags, nothing, nothing, nothing, flags[:0])

    def counted_in(self, boundaries: Integers, rows: Integers) -> tuple[Integers, Integers]:
        """Find the counted bounding tokens among open rows: indices of these, and ids of tokens.

        Args:
            boundaries: [open rows], ascending.
            rows: [open rows], ascending for each boundary.
        """
        counted = np.flatnonzero(self.counted)
        if not len(rows):
            return counted[:0], counted[:0]
        searched, searched_rows, ids = (
            column[counted] for column in (self.boundaries, self.rows, self.ids)
        )
        size = max(int(rows.max()), int(searched_rows.max(initial=0))) + 1
        keys, searched_keys = boundaries * size + rows, searched * size + searched_rows
        at = np.minimum(np.searchsorted(keys, searched_keys), len(keys) - 1)
        known = keys[at] == searched_keys
        return at[known], ids[known]


@dataclass(frozen=True, eq=False)
class Searched:
    """Strings after boundaries whose bounding tokens are searched."""

    texts: Strings  # [n]
    boundaries: Integers  # [n]
    cells: Integers  # [n], -1 for a candidate that is in no cell

    @classmethod
    def of(cls, texts: Strings, boundaries: Integers, likely: Flags, others: Names) -> "Searched":
        """Select the likely cells, and likely candidates that no cell contains."""
        cells, at = np.flatnonzero(likely), np.flatnonzero(others.likely)
        return cls(
            texts.at(cells).followed_by(others.texts.at(at)),
            np.concatenate([boundaries[cells], others.boundaries[at]]),
            np.concatenate([cells, np.full(len(at), -1, dtype=np.int64)]),
        )
