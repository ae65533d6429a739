"""``Strings``: slices of a teacher's tokens and of the student's text, many at once."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.text.boundaries import TokenizedText, is_space
from mopd_losses.prefix.vocabulary.hashed_strings import Codes, Hashes, Integers, joined
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary


@dataclass(frozen=True, eq=False)
class Strings:
    """Strings by their hashes; the characters are read only where a tokenizer needs them."""

    vocabulary: SortedVocabulary
    text: TokenizedText
    hashes: Hashes  # [n]
    lengths: Integers  # [n]
    ids: Integers  # [n], the token; -1 for a slice of the text
    starts: Integers  # [n], where the slice begins

    @classmethod
    def of_tokens(
        cls, vocabulary: SortedVocabulary, text: TokenizedText, ids: Integers, starts: Integers
    ) -> "Strings":
        """Take the ends of tokens, from these characters on."""
        stops = vocabulary.lengths[ids]
        return cls(
            vocabulary, text, vocabulary.slices(ids, starts, stops), stops - starts, ids, starts
        )

    @classmethod
    def of_text(
        cls, vocabulary: SortedVocabulary, text: TokenizedText, starts: Integers, lengths: Integers
    ) -> "Strings":
        """Take slices of the text."""
        ids = np.full(len(starts), -1, dtype=np.int64)
        return cls(vocabulary, text, text.slices(starts, starts + lengths), lengths, ids, starts)

    def __len__(self) -> int:
        return len(self.hashes)

    def string(self, index: int) -> str:
        """Return the characters of one string."""
        token = int(self.ids[index])
        whole = self.vocabulary.strings[token] if token >= 0 else self.text.symbols
        start = int(self.starts[index])
        return whole[start : start + int(self.lengths[index])]

    def strings(self, indices: Integers) -> list[str]:
        """Return the characters of strings."""
        own, symbols = self.vocabulary.strings, self.text.symbols
        starts = self.starts[indices]
        stops = starts + self.lengths[indices]
        columns = (self.ids[indices].tolist(), starts.tolist(), stops.tolist())
        return [
            (own[token] if token >= 0 else symbols)[start:stop]
            for token, start, stop in zip(*columns, strict=True)
        ]

    def at(self, indices: Integers | NDArray[np.bool_]) -> "Strings":
        """Select strings."""
        return Strings(
            self.vocabulary,
            self.text,
            self.hashes[indices],
            self.lengths[indices],
            self.ids[indices],
            self.starts[indices],
        )

    def followed_by(self, other: "Strings") -> "Strings":
        """Append strings of the same vocabulary and text."""
        return Strings(
            self.vocabulary,
            self.text,
            np.concatenate([self.hashes, other.hashes]),
            np.concatenate([self.lengths, other.lengths]),
            np.concatenate([self.ids, other.ids]),
            np.concatenate([self.starts, other.starts]),
        )

    def where(self, chosen: NDArray[np.bool_]) -> "Strings":
        """Replace all others by empty strings."""
        hashes, lengths = np.where(chosen, self.hashes, 0), np.where(chosen, self.lengths, 0)
        return Strings(self.vocabulary, self.text, hashes, lengths, self.ids, self.starts)

    def beginnings(self, lengths: Integers) -> Hashes:
        """Hash the first characters of each string."""
        stops = self.starts + lengths
        is_token = self.ids >= 0
        ids, zeros = np.where(is_token, self.ids, self.vocabulary.ids[0]), np.zeros_like(stops)
        of_tokens = self.vocabulary.slices(
            ids, np.where(is_token, self.starts, zeros), np.where(is_token, stops, zeros)
        )
        of_text = self.text.slices(
            np.where(is_token, zeros, self.starts), np.where(is_token, zeros, stops)
        )
        return np.where(is_token, of_tokens, of_text)

    def codes_at(self, offsets: Integers) -> Codes:
        """Return one character of each string."""
        at = self.starts + offsets
        codes = self.text.codes.take(np.where(self.ids < 0, at, 0))
        tokens = np.flatnonzero(self.ids >= 0)
        codes[tokens] = self.vocabulary.codes_at(self.ids[tokens], at[tokens])
        return codes

    def may_continue(
        self, vocabulary: SortedVocabulary, begun: Hashes, lengths: Integers
    ) -> NDArray[np.bool_]:
        """Return whether a token consists of what was begun and one or more first characters of a
        string, or begins with both.

        Args:
            vocabulary: of the tokens.
            begun: [n], before each string.
            lengths: [n], characters of these.
        """
        result = np.zeros(len(self), dtype=np.bool_)
        searched, count = np.arange(len(self)), 1
        while len(searched):
            beginnings = self.at(searched).beginnings(np.full(len(searched), count))
            nodes = vocabulary.nodes_of(joined(begun[searched], lengths[searched], beginnings))
            begins, is_last = nodes >= 0, self.lengths[searched] == count
            decided = begins & (vocabulary.are_tokens(nodes) | is_last)
            result[searched[decided]] = True
            searched = searched[begins & ~decided]
            count += 1
        return result

    def end_with_space(self) -> NDArray[np.bool_]:
        """Return whether white space is the last character of each string."""
        return is_space(self.codes_at(self.lengths - 1))

    def are_text(self) -> NDArray[np.bool_]:
        """Return whether each string does not end with a control token."""
        last = self.text.codes[np.where(self.ids >= 0, 0, self.starts + self.lengths - 1)]
        return np.where(self.ids >= 0, ~self.vocabulary.is_control[self.ids], last <= 0xFF)
