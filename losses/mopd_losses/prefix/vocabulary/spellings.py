"""``Spellings``: the tokens with which a tokenizer spells many strings."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_strings import utf8_text
from mopd_losses.prefix.vocabulary.hashed_strings import (
    SEPARATOR,
    Integers,
    codes_of,
    prefix_hashes,
    ranks_in_runs,
    slice_hashes,
)
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary
from mopd_protocol.tokenizers.token_table import TextEncoder


@dataclass(frozen=True, eq=False)
class Spellings:
    """The tokens of strings, as far as they spell these: a normaliser may have changed the text,
    and such a token does not apply to the string. A string that is no text has none."""

    is_text: NDArray[np.bool_]  # [strings]
    lengths: Integers  # [strings], characters
    counts: Integers  # [strings], all tokens of the tokenizer
    owners: Integers  # [tokens], indices of strings, ascending
    steps: Integers  # [tokens], the number of tokens before it
    ids: Integers  # [tokens]
    ends: Integers  # [tokens], characters of the string up to the end of the token

    @classmethod
    def of(
        cls, vocabulary: SortedVocabulary, encoder: TextEncoder, strings: Sequence[str]
    ) -> "Spellings":
        """Tokenize strings by one call."""
        decoded = [string if string.isascii() else utf8_text(string) for string in strings]
        is_text = np.array([text is not None for text in decoded], dtype=np.bool_)
        tokens = encoder.encode_arrays([text for text in decoded if text is not None])
        counts = np.zeros(len(strings), dtype=np.int64)
        counts[is_text] = tokens.counts
        owners, steps = np.repeat(np.arange(len(counts)), counts), ranks_in_runs(counts)
        lengths = np.fromiter(map(len, strings), dtype=np.int64, count=len(strings))
        starts = np.cumsum(lengths + 1) - lengths - 1
        characters = vocabulary.lengths[tokens.ids]
        before = np.concatenate([[0], np.cumsum(characters)])
        first = np.cumsum(counts) - counts
        ends = before[1:] - before[first][owners]
        is_inside = (ends <= lengths[owners]) & (characters > 0)
        stops = np.where(is_inside, starts[owners] + ends, characters)
        written = slice_hashes(
            prefix_hashes(codes_of(SEPARATOR.join(strings))), stops - characters, stops
        )
        own = vocabulary.slices(tokens.ids, np.zeros_like(characters), characters)
        different = np.concatenate([[0], np.cumsum(~is_inside | (written != own))])
        kept = different[1:] == different[first][owners]
        return cls(
            is_text, lengths, counts, owners[kept], steps[kept], tokens.ids[kept], ends[kept]
        )

    def first_ends(self) -> Integers:
        """[strings], the end of the first token; 0 without one."""
        ends = np.zeros(len(self.counts), dtype=np.int64)
        is_first = self.steps == 0
        ends[self.owners[is_first]] = self.ends[is_first]
        return ends

    def last_tokens(self) -> Integers:
        """[strings], the id of the last token; -1 without one, or if it does not end the string."""
        tokens = np.full(len(self.counts), -1, dtype=np.int64)
        is_last = self.ends == self.lengths[self.owners]
        tokens[self.owners[is_last]] = self.ids[is_last]
        return tokens


def written_ids(vocabulary: SortedVocabulary, encoder: TextEncoder) -> Integers:
    """[vocabulary], of tokens with equal strings the one that the tokenizer writes: a letter is
    often a token and also the token of its byte."""
    ids = np.arange(len(vocabulary.strings))
    several = np.flatnonzero(vocabulary.node_longer - vocabulary.node_starts > 1)
    strings = [vocabulary.string_at(int(rank)) for rank in vocabulary.node_starts[several]]
    spelled = Spellings.of(vocabulary, encoder, strings)
    written = np.full(len(strings), -1)
    written[spelled.owners] = np.where(spelled.steps == 0, spelled.ids, -1)
    columns = (vocabulary.node_starts[several], vocabulary.node_longer[several], strings, written)
    for start, stop, string, own in zip(*columns, strict=True):
        equal = vocabulary.ids[start:stop]
        ids[equal] = own if own >= 0 and vocabulary.strings[own] == string else equal[-1]
    return ids
