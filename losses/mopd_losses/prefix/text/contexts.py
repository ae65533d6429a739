"""``Contexts``: the text before each boundary, as far back as it could be divided differently."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.text.boundaries import Places, TokenizedText, is_space
from mopd_losses.prefix.text.strings import Strings
from mopd_losses.prefix.vocabulary.hashed_strings import (
    Hashes,
    Integers,
    character_hashes,
    joined,
    keys_of,
    ranks_in_runs,
)
from mopd_losses.prefix.vocabulary.sorted_vocabulary import are_continuations

#: Tokens before a boundary that a tokenizer may divide differently.
WINDOW = 2


@dataclass(frozen=True, eq=False)
class TextsBefore:
    """The texts before some offsets, from a token of a side on: equal texts of different
    completions need one call of a tokenizer."""

    text: TokenizedText
    first_rows: Integers  # [texts]
    covering_rows: Integers  # [texts], whose token covers the offset, or begins at it
    starts: Integers  # [texts], offsets
    lengths: Integers  # [texts]
    keys: Hashes  # [texts], of the text and of the tokens that spell it

    def texts(self, numbers: Integers) -> list[str]:
        """Return texts."""
        symbols, starts = self.text.symbols, self.starts[numbers]
        stops = starts + self.lengths[numbers]
        return [symbols[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]

    def written(self, numbers: Integers) -> list[str]:
        """Return texts with all of the covering token, and, if they end with white space or inside
        a character, with the rest of it, and what follows the run of white space."""
        starts, stops = self.starts[numbers], self._stops(numbers)
        columns = (starts.tolist(), stops.tolist())
        return [self.text.symbols[a:b] for a, b in zip(*columns, strict=True)]

    def written_keys(self, numbers: Integers) -> Hashes:
        """Hash ``written`` and the tokens of the texts."""
        stops = self._stops(numbers)
        ends = self.starts[numbers] + self.lengths[numbers]
        return keys_of(self.keys[numbers], self.text.slices(ends, stops), stops - ends)

    def _stops(self, numbers: Integers) -> Integers:
        """[numbers], where ``written`` ends."""
        text, rows = self.text, self.covering_rows[numbers]
        stops = self.starts[numbers] + self.lengths[numbers]
        if not len(text.starts):
            return stops
        rows = np.minimum(rows, len(text.starts) - 1)
        is_divided = is_space(text.codes.take(np.maximum(stops - 1, 0)))
        is_divided |= are_continuations(text.codes.take(stops))
        follows = is_divided & (text.starts[rows] == stops) & text.spells[rows]
        follows &= self.lengths[numbers] > 0
        return np.where(follows | (text.starts[rows] < stops), text.divided_ends[rows], stops)

    def counts(self, numbers: Integers) -> Integers:
        """Return how many tokens each text has, with the covering one if it is begun."""
        rows, text = self.covering_rows[numbers], self.text
        starts = text.starts[np.minimum(rows, max(len(text.starts) - 1, 0))]
        begun = starts < self.starts[numbers] + self.lengths[numbers]
        return rows + begun - self.first_rows[numbers]


@dataclass(frozen=True, eq=False)
class Contexts(TextsBefore):
    """The text before each boundary in a few tokens of a side, from the last word on that they
    begin."""

    places: Places

    @classmethod
    def of(cls, places: Places) -> "Contexts":
        """Find the context of each boundary."""
        text, rows = places.text, places.open_rows
        covering, begun = rows.rows[rows.last], rows.begun[rows.last]
        first = covering + (begun > 0)
        growing = np.ones(len(first), dtype=np.bool_)
        for _ in range(WINDOW + 1):
            before = np.maximum(first - 1, 0)
            starts = _starts(places, first)
            growing &= (starts == places.offsets) | ~text.follow_word(starts)
            growing &= first > np.maximum(covering - WINDOW, 0)
            growing &= (text.starts[before] >= places.blocks) & text.spells[before]
            first = first - growing
        first = _at_characters(places, first, covering)
        starts = _starts(places, first)
        lengths = places.offsets - starts
        keys = _keys(places, np.arange(len(first)), first, starts)
        return cls(text, first, covering, starts, lengths, keys, places)

    def beginning_at(self, boundaries: Integers, rows: Integers) -> TextsBefore:
        """Return the ends of contexts, from rows on that these contain."""
        text = self.text
        starts = text.starts[rows]
        lengths = self.places.offsets[boundaries] - starts
        keys = _keys(self.places, boundaries, rows, starts)
        return TextsBefore(text, rows, self.covering_rows[boundaries], starts, lengths, keys)

    def end_with_space(self, boundaries: Integers) -> NDArray[np.bool_]:
        """Return whether white space is before each boundary."""
        return is_space(self.text.codes.take(self.places.offsets[boundaries] - 1))

    @cached_property
    def end_with_run(self) -> NDArray[np.bool_]:
        """[boundaries], whether at least two characters of white space are before each: a tokenizer
        may divide the run by what follows, also where no token crosses the boundary."""
        offsets, codes = self.places.offsets, self.text.codes
        results = self.lengths > 1
        for before in (1, 2):
            results &= is_space(codes.take(np.maximum(offsets - before, 0)))
        return results

    @cached_property
    def inside_tokens(self) -> NDArray[np.bool_]:
        """[boundaries], whether the last open row has begun a token before each: what follows may
        divide the text before the boundary anew."""
        rows = self.places.open_rows
        return (rows.begun[rows.last] > 0) & (self.lengths > 0)

    def may_cross(self, boundaries: Integers, texts: Strings) -> NDArray[np.bool_]:
        """Return whether the text after a boundary may be divided otherwise than at the boundary:
        by a token that begins inside the context, or that ends inside the text."""
        text, vocabulary = self.text, self.text.vocabulary
        lengths, offsets = self.lengths[boundaries], self.places.offsets[boundaries]
        result = np.where(lengths == 0, texts.lengths > 1, ~texts.are_text())
        characters = texts.codes_at(np.zeros_like(lengths))
        # Only the first character matters, which many strings in succession have.
        first = np.ones(len(result), dtype=np.bool_)
        first[1:] = (characters[1:] != characters[:-1]) | (boundaries[1:] != boundaries[:-1])
        runs = np.cumsum(first) - 1
        first = np.flatnonzero(first)
        lengths, offsets, characters = lengths[first], offsets[first], characters[first]
        possible = vocabulary.contain(text.codes.take(offsets - 1), characters) & (lengths > 0)
        possible = np.flatnonzero(possible)
        # Every token that would begin inside the context, and continue.
        before = ranks_in_runs(lengths[possible]) + 1
        at = np.repeat(possible, lengths[possible])
        following = character_hashes(characters[at])
        begun = joined(text.slices(offsets[at] - before, offsets[at]), before, following)
        crosses = np.zeros(len(first), dtype=np.bool_)
        crosses[at[vocabulary.nodes_of(begun) >= 0]] = True
        result |= crosses[runs]
        return result

    def are_several(self, boundaries: Integers, texts: Strings) -> NDArray[np.bool_]:
        """Return whether what the last open row has begun and the text after the boundary are no
        token: a side that has only the beginning of longer tokens spells them with several."""
        nodes = self.places.nodes_after(self.places.open_rows.last[boundaries], texts.hashes)
        return (nodes >= 0) & ~self.text.vocabulary.are_tokens(nodes)


def _starts(places: Places, rows: Integers) -> Integers:
    """[boundaries], where a row of each begins, and the boundary if that is after it."""
    starts = np.append(places.text.starts, np.iinfo(np.int64).max)[rows]
    return np.minimum(starts, places.offsets)


def _at_characters(places: Places, first: Integers, covering: Integers) -> Integers:
    """[boundaries], the first rows that begin with a character: tokens of single bytes may begin
    inside one, and a tokenizer spells whole ones. A boundary inside a character has no such row,
    nor has one inside a token that begins so.

    Args:
        first: [boundaries], rows.
        covering: [boundaries], the last rows that may be returned.
    """
    text = places.text
    if not len(text.starts):
        return first
    first = first.copy()
    at_character = ~are_continuations(text.codes.take(places.offsets, mode="clip"))
    inside = np.flatnonzero(at_character & (first < covering))
    while len(inside):
        inside = inside[are_continuations(text.codes.take(text.starts[first[inside]]))]
        first[inside] += 1
        inside = inside[first[inside] < covering[inside]]
    return first


def _keys(places: Places, boundaries: Integers, first: Integers, starts: Integers) -> Hashes:
    """Hash the text from some rows on before boundaries, and its tokens."""
    text, rows = places.text, places.open_rows
    last = rows.last[boundaries]
    covering, begun = rows.rows[last], rows.begun[last]
    offsets = places.offsets[boundaries]
    parts = [text.slices(starts, offsets), offsets - starts, covering - first, begun]
    for step in range(WINDOW + 1):
        at = np.minimum(first + step, covering)
        parts.append(np.where(first + step < covering + (begun > 0), text.ids[at], -1))
    return keys_of(*parts)
