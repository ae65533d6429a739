"""``FirstEnds``: where the first token ends that reaches beyond what was begun."""

from collections.abc import Sequence

import numpy as np

from mopd_losses.prefix.vocabulary.hashed_strings import (
    Integers,
    string_hashes,
)
from mopd_losses.prefix.vocabulary.key_table import KeyTable
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary
from mopd_losses.prefix.vocabulary.spellings import Spellings
from mopd_protocol.tokenizers.token_table import TextEncoder

#: Strings kept in memory; beyond, all are discarded and computed again.
_CACHED = 500_000

#: The end where a tokenizer does not take the string.
NOT_TEXT = -1

#: Last characters of a string whose ends are recorded: a number has a bit for each, one for what is
#: text, and none for its sign.
_RECORDED = 62

#: The bit of what is text.
_IS_TEXT = 1


class FirstEnds:
    """Finds these ends by one tokenizer."""

    def __init__(self, vocabulary: SortedVocabulary, encoder: TextEncoder) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._table = KeyTable(_CACHED)  # of the bits of all ends of a string

    def of(self, begun: Sequence[int], strings: Sequence[str]) -> Integers:
        """Return the characters from what was begun up to that end: [strings]; 0 if the tokens that
        spell the string do not reach it, ``NOT_TEXT`` if the string is no text. Unknown strings
        take one call of the tokenizer.

        Args:
            begun: [strings], characters at the beginning of each string.
        """
        lengths = np.fromiter(map(len, strings), dtype=np.int64, count=len(strings))

        def compute(indices: Integers) -> Integers:
            unknown: list[int] = indices.tolist()
            return self._end_bits([strings[index] for index in unknown])

        bits = self._table.computed(string_hashes(strings), compute)
        first = np.array(begun, dtype=np.int64) - _unrecorded(lengths)
        beyond = np.where(first < 0, 0, bits >> np.maximum(first, 0) >> 1)
        _, exponents = np.frexp((beyond & -beyond).astype(np.float64))  # one more than that of it
        ends = np.where(beyond > 0, exponents.astype(np.int64), 0)
        return np.where(bits & _IS_TEXT, ends, NOT_TEXT)

    def _end_bits(self, strings: list[str]) -> Integers:
        spelled = Spellings.of(self._vocabulary, self._encoder, strings)
        ends = spelled.ends - _unrecorded(spelled.lengths)[spelled.owners]
        kept = ends > 0
        bits = np.where(spelled.is_text, _IS_TEXT, 0)
        np.bitwise_or.at(bits, spelled.owners[kept], 1 << ends[kept])
        return bits


def _unrecorded(lengths: Integers) -> Integers:
    return np.maximum(lengths - _RECORDED, 0)
