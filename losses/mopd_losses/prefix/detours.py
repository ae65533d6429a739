"""``Detours``: the tokens by which a side reaches a cell, where these are not its realised tokens.

The rows of a completion give the mass of text over the realised tokens. A tokenizer that does not
match the longest token may divide the text before a boundary differently once a cell follows:
``bb`` is one token, but ``bba`` is ``b|ba``. A side that produced ``bb`` never continues with
``a``: that mass is part of its token ``b``, one row earlier, and what would follow ``b`` is in a
row that was not computed. The detour of the cell is that row and token; its mass is an upper bound
of what the cell lacks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.contexts import Contexts
from mopd_losses.prefix.names import Candidates
from mopd_losses.prefix.strings import Strings
from mopd_losses.prefix.vocabulary.hashed_strings import Integers, keys_of, ranks_in_runs
from mopd_losses.prefix.vocabulary.key_table import KeyTable
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary, utf8_text
from mopd_protocol.tokenizers.token_table import TextEncoder

#: Tokens that are tried behind a shorter token.
_PROBES = 4

#: Contexts and cells kept in memory; beyond, all are discarded and computed again.
CACHED = 500_000

#: The detour of a cell that is reached over the realised tokens.
_NO_DETOUR = 0

#: A detour is ``1 + flag + 2 * (steps + _STEPS * token)``, with the flag of counted tokens.
_STEPS = 8

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class CellDetours:
    """Detours of the cells of completions on one side; a boundary lists each token once."""

    cells: Flags  # [cells], whether a cell has a detour
    boundaries: Integers  # [detours], ascending
    rows: Integers  # [detours]
    ids: Integers  # [detours]
    counted: Flags  # [detours], whether the token is mass of what is open


@dataclass(frozen=True, eq=False)
class Sought:
    """Strings behind boundaries whose detours are sought."""

    texts: Strings  # [n]
    boundaries: Integers  # [n]
    cells: Integers  # [n], -1 for a candidate that is in no cell

    @classmethod
    def of(
        cls, texts: Strings, boundaries: Integers, likely: Flags, others: Candidates
    ) -> "Sought":
        """Select the likely cells, and candidates that no cell contains."""
        cells = np.flatnonzero(likely)
        return cls(texts.at(cells), boundaries[cells], cells).and_rest(
            others.texts, others.boundaries
        )

    def and_rest(self, texts: Strings, boundaries: Integers) -> "Sought":
        """Add strings that are in no cell."""
        return Sought(
            self.texts.followed_by(texts),
            np.concatenate([self.boundaries, boundaries]),
            np.concatenate([self.cells, np.full(len(texts), -1, dtype=np.int64)]),
        )


class Detours:
    """Finds the detours of one side, by its tokenizer."""

    def __init__(self, vocabulary: SortedVocabulary, encoder: TextEncoder) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self.table = KeyTable(CACHED)
        self._canonical = KeyTable(CACHED)
        self._whole = KeyTable(CACHED)

    def of(self, contexts: Contexts, sought: Sought, cells: int) -> CellDetours:
        """Find the detours of likely cells, and of candidates that are in the rest.

        Args:
            cells: how many there are.
        """
        possible = np.flatnonzero(contexts.may_cross(sought.boundaries, sought.texts))
        numbers = sought.boundaries[possible]
        texts = sought.texts.at(possible)
        keys = keys_of(contexts.keys[numbers], texts.hashes)

        def compute(indices: Integers) -> Integers:
            strings = [texts.string(index) for index in indices.tolist()]
            return np.array(self._detours(contexts, numbers[indices].tolist(), strings))

        codes = self.table.computed(keys, compute)
        counted = codes & 1 == 0  # one more than the flag
        # A counted token is mass of the rest, and so is a candidate that is in no cell.
        kept = np.flatnonzero((codes != _NO_DETOUR) & ~((sought.cells[possible] < 0) & counted))
        kept = kept[self._are_canonical(contexts, numbers[kept])]
        reached = np.zeros(cells, dtype=np.bool_)
        with_cell = sought.cells[possible[kept]]
        reached[with_cell[with_cell >= 0]] = True
        steps, ids = (codes[kept] - 1) // 2 % _STEPS, (codes[kept] - 1) // 2 // _STEPS
        rows = contexts.first_rows[numbers[kept]] + steps
        numbers = numbers[kept]
        order = (numbers * _STEPS + steps) * len(self._vocabulary.strings) + ids
        _, first = np.unique(order, return_index=True)
        counted = counted[kept][first]
        return CellDetours(reached, numbers[first], rows[first], ids[first], counted)

    def are_one_token(self, contexts: Contexts, boundaries: Integers, lengths: Integers) -> Flags:
        """Return whether one token spells the text behind each boundary, and perhaps what is before
        it: the realised one, or the tokenizer's.

        Args:
            lengths: characters of the text, at most up to the end of the realised token.
        """
        text, offsets = contexts.places.text, contexts.places.offsets[boundaries]
        stops = offsets + lengths
        results = text.ends[contexts.covering_rows[boundaries]] == stops
        longer = np.flatnonzero(~results)
        keys = keys_of(
            contexts.keys[boundaries[longer]], text.slices(offsets[longer], stops[longer])
        )

        def compute(indices: Integers) -> Integers:
            rows = longer[indices]
            return np.array(
                self._are_one(contexts, boundaries[rows].tolist(), lengths[rows].tolist())
            )

        results[longer] = self._whole.computed(keys, compute) == 1
        return results

    def _are_one(self, contexts: Contexts, boundaries: list[int], lengths: list[int]) -> list[bool]:
        """``are_one_token`` by the tokenizer."""
        symbols = contexts.places.text.symbols
        texts: list[str] = []
        owners: list[int] = []
        for index, (number, length) in enumerate(zip(boundaries, lengths, strict=True)):
            offset = int(contexts.places.offsets[number])
            text = utf8_text(contexts.text(number) + symbols[offset : offset + length])
            if text is not None:
                texts.append(text)
                owners.append(index)
        results = [False] * len(boundaries)
        for index, ids in zip(owners, self._encoder.encode_batch(texts), strict=True):
            start = int(contexts.lengths[boundaries[index]])
            results[index] = self._is_one(ids, start, start + lengths[index])
        return results

    def _is_one(self, ids: list[int], start: int, stop: int) -> bool:
        """Return whether one token spells the characters ``[start, stop)``, with or without more on
        either side."""
        end = 0
        for token in ids:
            begin, end = end, end + len(self._vocabulary.strings[token])
            if end >= stop:
                return begin <= start
        return False

    def _are_canonical(self, contexts: Contexts, boundaries: Integers) -> Flags:
        """Return whether the tokens of each context are the tokenizer's.

        After others, which a student may sample, most of the mass of the text is on the tokenizer's
        path: nothing would be compared.
        """

        def compute(indices: Integers) -> Integers:
            numbers = boundaries[indices].tolist()
            texts = [contexts.written(number) for number in numbers]
            encoded = iter(self._encoder.encode_batch([t for t in texts if t is not None]))
            results: list[bool] = []
            for number, text in zip(numbers, texts, strict=True):
                ids = next(encoded) if text is not None else None
                first = contexts.first_rows[number]
                written = contexts.places.text.ids[first : first + len(ids or ())].tolist()
                results.append(ids is not None and written == ids)
            return np.array(results)

        return self._canonical.computed(contexts.keys[boundaries], compute) == 1

    def _detours(self, contexts: Contexts, boundaries: list[int], strings: list[str]) -> list[int]:
        """Find the first token to each string that is neither realised nor known mass of it."""
        texts: list[str] = []
        owners: list[int] = []
        wholes = [contexts.text(number) + s for number, s in zip(boundaries, strings, strict=True)]
        for index, (number, whole) in enumerate(zip(boundaries, wholes, strict=True)):
            # A control token is never merged with the text before it.
            is_text = ord(whole[-1]) <= 0xFF
            text = utf8_text(whole if is_text else whole[: int(contexts.lengths[number])])
            if text is not None:
                texts.append(text)
                owners.append(index)
        results = [_NO_DETOUR] * len(strings)
        for index, ids in zip(owners, self._encoder.encode_batch(texts), strict=True):
            results[index] = self._detour(contexts, boundaries[index], wholes[index], ids)
        return results

    def _detour(self, contexts: Contexts, boundary: int, whole: str, path: list[int]) -> int:
        first, covering = (
            int(rows[boundary]) for rows in (contexts.first_rows, contexts.covering_rows)
        )
        start, length = 0, int(contexts.lengths[boundary])
        for step, token in enumerate(path):
            string = self._vocabulary.strings[token]
            end = start + len(string)
            # A normaliser may have changed the text; its tokens do not apply to this one.
            if not string or not whole.startswith(string, start):
                return _NO_DETOUR
            if end > length:
                return _encoded(step, token, True) if end < len(whole) else _NO_DETOUR
            if token != contexts.places.text.ids[first + step]:
                return _encoded(step, token, end == length and first + step == covering)
            start = end
        return _NO_DETOUR


def _encoded(steps: int, token: int, counted: bool) -> int:
    return 1 + counted + 2 * (steps + _STEPS * token)


def probed(contexts: Contexts, rows: Integers, tokens: Integers) -> tuple[Strings, Integers]:
    """Return a few strings that may follow, by tokens that follow a shorter one, and their
    boundaries.

    Args:
        rows: ascending.
        tokens: of these rows, shorter than the realised ones, which begin with them.
    """
    text, vocabulary = contexts.places.text, contexts.places.text.vocabulary
    first, last = np.searchsorted(rows, [contexts.first_rows, contexts.covering_rows + 1])
    counts = np.maximum(last - first, 0)
    boundaries = np.repeat(np.arange(len(counts)), counts)
    at = np.repeat(first, counts) + ranks_in_runs(counts)
    ends = text.starts[rows[at]] + vocabulary.lengths[tokens[at]]
    offsets = contexts.places.offsets[boundaries]
    kept = ends < offsets
    boundaries, ends, offsets = boundaries[kept], ends[kept], offsets[kept]
    nodes = vocabulary.nodes_of(text.slices(ends, offsets))
    longer, stops = vocabulary.node_longer[nodes], vocabulary.node_stops[nodes]
    steps = np.maximum(-(-(stops - longer) // _PROBES), 1)
    counts = -(-(stops - longer) // steps)
    index = np.repeat(np.arange(len(counts)), counts)
    ranks = longer[index] + ranks_in_runs(counts) * steps[index]
    strings = Strings.of_tokens(vocabulary, text, vocabulary.ids[ranks], (offsets - ends)[index])
    return strings, boundaries[index]
