"""``ShorterTokenizations``: bounding tokens that are written in place of longer ones.

A token is written in place of a longer one by what follows, which no text up to the boundary shows:
`` O|SE|rr|or``, although `` OS`` is a token. Such a token is searched for every token that spells a
likely cell, or that ends at the boundary.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.text.contexts import WINDOW, Contexts
from mopd_losses.prefix.text.strings import Strings
from mopd_losses.prefix.vocabulary.hashed_strings import Hashes, Integers, indices_in_runs, joined
from mopd_losses.prefix.vocabulary.shorter_tokens import ShorterTokens
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary

#: Indices of cells, and the rows and ids of tokens.
CellTokens = tuple[Integers, Integers, Integers]


class ShorterTokenizations:
    """Finds them for one side.

    Args:
        are_canonical: contexts and boundaries -> whether the tokens of each context are the
            tokenizer's.
    """

    def __init__(
        self,
        vocabulary: SortedVocabulary,
        shorter: ShorterTokens,
        are_canonical: Callable[[Contexts, Integers], NDArray[np.bool_]],
    ) -> None:
        self._vocabulary = vocabulary
        self._shorter = shorter
        self._are_canonical = are_canonical

    def of_cells(self, contexts: Contexts, numbers: Integers, texts: Strings) -> CellTokens:
        """Find those in place of a token that spells a cell, and what its row has begun.

        Args:
            numbers: [cells], boundaries.
            texts: [cells]
        """
        places = contexts.places
        rows = places.open_rows
        cells, opened = indices_in_runs(rows.first[numbers], rows.last[numbers] + 1)
        numbers = numbers[cells]
        in_context = rows.rows[opened] >= contexts.first_rows[numbers]
        cells, numbers, opened = cells[in_context], numbers[in_context], opened[in_context]
        hashes = places.joined_hashes(opened, texts.hashes[cells])
        at, ids = self._beginnings(hashes)
        # Tokens that end before the boundary bound other texts, and one that ends at it is on the
        # sampled path, but for the last row.
        least = rows.begun[opened] + (opened < rows.last[numbers])
        kept = self._vocabulary.lengths[ids] >= least[at]
        at, ids = at[kept], ids[kept]
        kept = self._are_canonical(contexts, numbers[at])
        at, ids = at[kept], ids[kept]
        return cells[at], rows.rows[opened[at]], ids

    def before_cells(self, contexts: Contexts, boundaries: Integers, texts: Strings) -> CellTokens:
        """Find those in place of a token that ends at the boundary, in front of a cell: `D|ona|ud`
        for `Don|au`.

        Args:
            boundaries: [cells], ascending.
            texts: [cells]
        """
        text, vocabulary = contexts.text, self._vocabulary
        numbers = np.unique(boundaries)
        counts = contexts.counts(numbers)
        at, steps = np.nonzero(np.arange(WINDOW + 1) < counts[:, None])
        numbers = numbers[at]
        rows = contexts.first_rows[numbers] + steps
        starts, offsets = text.starts[rows], contexts.places.offsets[numbers]
        hashes = text.slices(starts, offsets)
        at, ids = self._beginnings(hashes)
        # Each of these, with every cell of its boundary.
        first, last = np.searchsorted(boundaries, [numbers[at], numbers[at] + 1])
        owners, cells = indices_in_runs(first, last)
        at, ids = at[owners], ids[owners]
        # A token must cross the boundary.
        texts = texts.at(cells)
        lengths = vocabulary.lengths[ids]
        rests = text.slices(starts[at] + lengths, offsets[at])
        left = offsets[at] - starts[at] - lengths
        crossed = vocabulary.nodes_of(joined(rests, left, texts.hashes)) >= 0
        at, ids, lengths, texts = at[crossed], ids[crossed], lengths[crossed], texts.at(crossed)
        cells = cells[crossed]
        joined_hashes = joined(hashes[at], offsets[at] - starts[at], texts.hashes)

        def whole(index: int) -> str:
            entry = at[index]
            return text.symbols[starts[entry] : offsets[entry]] + texts.string(index)

        bits = self._shorter.of(joined_hashes, whole)
        kept = np.flatnonzero(bits >> lengths & 1)
        kept = kept[self._are_canonical(contexts, numbers[at[kept]])]
        return cells[kept], rows[at[kept]], ids[kept]

    def _beginnings(self, hashes: Hashes) -> tuple[Integers, Integers]:
        """Find the shorter tokens in place of those that spell strings: the indices of strings, and
        the ids of tokens."""
        vocabulary = self._vocabulary
        nodes = vocabulary.nodes_of(hashes)
        at = np.flatnonzero(vocabulary.are_tokens(nodes))
        ranks = vocabulary.node_starts[nodes[at]]
        bits = self._shorter.of(hashes[at], lambda index: vocabulary.string_at(int(ranks[index])))
        reached = np.flatnonzero(bits)
        longest = int(bits.max(initial=0)).bit_length()
        owners, lengths = np.nonzero(bits[reached, None] >> np.arange(longest) & 1)
        owners = reached[owners]
        tokens = vocabulary.ids[ranks[owners]]
        shorter = vocabulary.slices(tokens, np.zeros_like(lengths), lengths)
        return at[owners], vocabulary.ids[vocabulary.node_starts[vocabulary.nodes_of(shorter)]]
