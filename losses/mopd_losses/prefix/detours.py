"""``Detours``: the tokens by which a side reaches a cell, where these are not its realised tokens.

The rows of a completion give the mass of text over the realised tokens. A tokenizer that does not
match the longest token may divide the text before a boundary differently once a cell follows:
``bb`` is one token, but ``bba`` is ``b|ba``. A side that produced ``bb`` never continues with
``a``: that mass is part of its token ``b``, one row earlier, and what would follow ``b`` is in a
row that was not computed. The detour of the cell is that row and token; its mass is an upper bound
of what the cell lacks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.boundaries import Integers, OpenRows, TokenizedText
from mopd_losses.prefix.names import CellNames, is_text
from mopd_losses.prefix.sorted_vocabulary import SortedVocabulary, utf8_text
from mopd_protocol.tokenizers.token_table import TextEncoder

#: Tokens before a boundary that a tokenizer may divide differently.
_WINDOW = 2

#: Characters behind a realised text that show how it is divided.
_CONTINUED = 4

#: Tokens that are tried behind a shorter token.
_PROBES = 8

#: Contexts and cells kept in memory; beyond, all are discarded and computed again.
_CACHED = 500_000

#: The text before a boundary, and a cell.
_Pair = tuple[str, str]


@dataclass(frozen=True, eq=False)
class CellDetours:
    """Detours of the cells of one completion on one side; a boundary lists each token once."""

    cells: NDArray[np.bool_]  # [cells], whether a cell has a detour
    boundaries: Integers  # [detours], ascending
    rows: Integers  # [detours]
    ids: Integers  # [detours]
    counted: NDArray[np.bool_]  # [detours], whether the token is mass of what is open


@dataclass(frozen=True)
class _Context:
    """The text before one boundary in a few tokens of a side."""

    boundary: int
    text: str
    first_row: int
    covering_row: int


class _Detour(NamedTuple):
    """A token by which a cell is reached."""

    row: int
    token: int
    counted: bool


class Detours:
    """Finds the detours of one side, by its tokenizer."""

    def __init__(self, vocabulary: SortedVocabulary, encoder: TextEncoder) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._paths: dict[_Pair, list[int]] = {}
        self._crossings: dict[_Pair, bool] = {}
        self._last: tuple[OpenRows, list[_Context]] | None = None

    def of(
        self,
        text: TokenizedText,
        rows: OpenRows,
        names: CellNames,
        likely: NDArray[np.bool_],
        shorter: Mapping[int, Sequence[int]] | None = None,
    ) -> CellDetours:
        """Find the detours of a completion's likely cells, and of candidates that are in the rest.

        Args:
            likely: bool [cells].
            shorter: row -> likely tokens with which the realised one begins; what may follow them
                is in the rest, too.
        """
        contexts = self._contexts(text, rows)
        cells = np.flatnonzero(likely)
        cell_boundaries = zip(cells.tolist(), names.boundaries[cells].tolist(), strict=True)
        sought = [(contexts[number], cell, names.texts[cell]) for cell, number in cell_boundaries]
        for context in contexts:
            probes = self._probes(text, context, shorter) if shorter else ()
            strings = {*names.unnamed[context.boundary], *probes}
            sought += [(context, None, string) for string in strings]
        self._prepare({(context.text, string) for context, _, string in sought})
        detours: list[tuple[int, int | None, _Detour]] = []
        for context, cell, string in sought:
            path = self._paths[context.text, string]
            detour = self._detour(text, context, string, path) if path else None
            # A counted token is mass of the rest, and so is a candidate that is in no cell.
            if detour is not None and not (cell is None and detour.counted):
                detours.append((context.boundary, cell, detour))
        numbers = sorted({boundary for boundary, _, _ in detours})
        canonical = self._canonical(text, [contexts[number] for number in numbers])
        reached = np.zeros(len(names.texts), dtype=np.bool_)
        counted: dict[tuple[int, int, int], bool] = {}
        for boundary, cell, detour in detours:
            if boundary in canonical:
                counted[boundary, detour.row, detour.token] = detour.counted
                if cell is not None:
                    reached[cell] = True
        ordered = sorted(counted)
        boundaries, at, ids = np.array(ordered, dtype=np.int64).reshape(-1, 3).T
        flags = np.array([counted[key] for key in ordered], dtype=np.bool_)
        return CellDetours(reached, boundaries, at, ids, flags)

    def whole(self, text: TokenizedText, rows: OpenRows, texts: Mapping[int, str]) -> set[int]:
        """Return the boundaries behind which one token spells a text, also as it continues.

        Args:
            texts: boundary -> a beginning of what follows the boundary.
        """
        contexts = self._contexts(text, rows)
        strings: dict[int, tuple[str, str]] = {}
        for number, realised in texts.items():
            before = contexts[number].text + realised
            stop = int(text.starts[contexts[number].first_row]) + len(before)
            following = takewhile(is_text, text.symbols[stop : stop + _CONTINUED])
            both = utf8_text(before), utf8_text(before + "".join(following))
            if both[0] is not None and both[1] is not None:
                strings[number] = (both[0], both[1])
        encoded = self._encoder.encode_batch([s for both in strings.values() for s in both])
        return {
            number
            for number, *paths in zip(strings, encoded[::2], encoded[1::2], strict=True)
            if all(self._is_one(ids, len(contexts[number].text), texts[number]) for ids in paths)
        }

    def _contexts(self, text: TokenizedText, rows: OpenRows) -> list[_Context]:
        """[boundaries]; those of the last completion are kept."""
        if self._last is None or self._last[0] is not rows:
            self._last = rows, list(_contexts(text, rows))
        return self._last[1]

    def _is_one(self, ids: list[int], start: int, text: str) -> bool:
        """Return whether one token spells a text that begins at ``start``, with or without more on
        either side."""
        end = 0
        for token in ids:
            begin, end = end, end + len(self._vocabulary.strings[token])
            if end >= start + len(text):
                return begin <= start
        return False

    def _canonical(self, text: TokenizedText, contexts: list[_Context]) -> set[int]:
        """Return the boundaries of contexts whose tokens are the tokenizer's.

        After others, which a student may sample, most of the mass of the text is on the tokenizer's
        path: nothing would be compared.
        """
        texts: dict[_Context, str] = {}
        for context in contexts:
            start = int(text.starts[context.first_row])
            stop = start + len(context.text)
            if text.starts[context.covering_row] < stop:
                stop = int(text.ends[context.covering_row])
            written = utf8_text(text.symbols[start:stop])
            if written is not None:
                texts[context] = written
        encoded = self._encoder.encode_batch(list(texts.values()))
        return {
            context.boundary
            for context, ids in zip(texts, encoded, strict=True)
            if text.ids[context.first_row : context.first_row + len(ids)] == ids
        }

    def _probes(
        self, text: TokenizedText, context: _Context, shorter: Mapping[int, Sequence[int]]
    ) -> Iterator[str]:
        """Yield a few strings that may follow, by tokens that follow a shorter one."""
        offset = int(text.starts[context.first_row]) + len(context.text)
        for row in range(context.first_row, context.covering_row + 1):
            for token in shorter.get(row, ()):
                end = int(text.starts[row]) + len(self._vocabulary.strings[token])
                if end < offset:
                    covered = text.symbols[end:offset]
                    tokens = self._vocabulary.range_of(covered)
                    step = -(-(tokens.stop - tokens.longer) // _PROBES)
                    for rank in range(tokens.longer, tokens.stop, max(step, 1)):
                        yield self._vocabulary.string_at(rank)[len(covered) :]

    def _is_possible(self, context: str, cell: str) -> bool:
        """Return whether the cell's text may be divided otherwise than at the boundary: by a token
        that begins inside the context, or that ends inside the cell."""
        if not context:
            return len(cell) > 1
        if not is_text(cell):
            return True
        crosses = self._crossings.get((context, cell[0]))
        if crosses is None:
            if len(self._crossings) >= _CACHED:
                self._crossings.clear()
            begun = context + cell[0]
            crosses = any(self._vocabulary.covers(begun[at:]) for at in range(len(context)))
            self._crossings[context, cell[0]] = crosses
        return crosses

    def _prepare(self, pairs: set[_Pair]) -> None:
        """Compute the tokens of these pairs, with one call of the tokenizer."""
        missing = [pair for pair in pairs if pair not in self._paths]
        if len(self._paths) + len(missing) > _CACHED:
            self._paths.clear()
            missing = list(pairs)
        texts: list[str] = []
        owners: list[_Pair] = []
        for context, cell in missing:
            self._paths[context, cell] = []
            # A control token is never merged with the text before it.
            if not self._is_possible(context, cell):
                continue
            before = utf8_text(context + cell if is_text(cell) else context)
            if before is not None:
                texts.append(before)
                owners.append((context, cell))
        for owner, ids in zip(owners, self._encoder.encode_batch(texts), strict=True):
            self._paths[owner] = self._until_beyond(len(owner[0]), ids)

    def _until_beyond(self, length: int, ids: list[int]) -> list[int]:
        """Select the tokens up to the first one that ends beyond ``length``."""
        end = 0
        for count, token in enumerate(ids, start=1):
            end += len(self._vocabulary.strings[token])
            if end > length:
                return ids[:count]
        return ids

    def _detour(
        self, text: TokenizedText, context: _Context, cell: str, path: list[int]
    ) -> "_Detour | None":
        """Return the first token of a path that is neither realised nor known mass of the cell."""
        start, length = 0, len(context.text)
        whole = context.text + cell
        for row, token in enumerate(path, start=context.first_row):
            string = self._vocabulary.strings[token]
            end = start + len(string)
            # A normaliser may have changed the text; its tokens do not apply to this one.
            if not string or not whole.startswith(string, start):
                return None
            if end > length:
                return _Detour(row, token, True) if end < len(whole) else None
            if token != text.ids[row]:
                return _Detour(row, token, end == length and row == context.covering_row)
            start = end
        return None


def _contexts(text: TokenizedText, rows: OpenRows) -> Iterator[_Context]:
    """The text before each boundary, as far back as it could be divided differently."""
    starts = text.starts.tolist()
    covering = rows.rows[rows.last].tolist()
    blocks = rows.blocks.tolist()
    for boundary, last in enumerate(rows.last.tolist()):
        covering_row = covering[boundary]
        offset = starts[covering_row] + len(rows.begun[last])
        first = covering_row + bool(rows.begun[last])
        while (
            first > max(covering_row - _WINDOW, 0)
            and starts[first - 1] >= blocks[boundary]
            and text.spells[first - 1]
        ):
            first -= 1
        yield _Context(boundary, text.symbols[starts[first] : offset], first, covering_row)
