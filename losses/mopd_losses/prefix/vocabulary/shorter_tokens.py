"""``ShorterTokens``: the tokens that a tokenizer writes in place of a longer one, by what follows.

`` OS`` is a token, but `` OSError`` may be `` O|SE|rr|or``. A student that is sure of the latter
has no mass in the token `` OS``: it is in `` O``, of which that mass is an unknown part.
"""

from collections.abc import Callable, Iterator

import numpy as np

from mopd_losses.prefix.vocabulary.hashed_strings import Hashes, Integers
from mopd_losses.prefix.vocabulary.key_table import KeyTable
from mopd_losses.prefix.vocabulary.merges import Merges
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary
from mopd_losses.prefix.vocabulary.spellings import Spellings
from mopd_protocol.tokenizers.token_table import TextEncoder

#: Tokens that are tried after a shorter one, with the lowest ids: the frequent ones.
TRIED = 16

#: The longest token for which shorter ones are searched, in characters: bits of an integer.
LONGEST = 60

#: What is tried after white space.
WORD = "a"

#: Tokens kept in memory; beyond, all are discarded and computed again.
_CACHED = 500_000


class ShorterTokens:
    """Finds them for one tokenizer."""

    def __init__(self, vocabulary: SortedVocabulary, encoder: TextEncoder, merges: Merges) -> None:
        self._vocabulary = vocabulary
        self._merges = merges
        self._encoder = encoder
        self.table = KeyTable(_CACHED)

    def of(self, keys: Hashes, text: Callable[[int], str]) -> Integers:
        """Return the lengths of the first tokens with which the tokenizer may begin each text in
        place of a token that spells all of it, as bits.

        Args:
            keys: hashes of texts.
            text: index of a key -> its string.
        """

        def compute(indices: Integers) -> Integers:
            owners, lengths, texts = list[int](), list[int](), list[str]()
            full_texts = [text(index) for index in indices.tolist()]
            for number, whole in enumerate(full_texts):
                for length, tried in self._tried(whole):
                    owners.append(number)
                    lengths.append(length)
                    texts.append(tried)
            ends = Spellings.of(self._vocabulary, self._encoder, texts).first_ends()
            searched, numbers = (np.array(each, dtype=np.int64) for each in (lengths, owners))
            longest = np.array([min(len(whole), LONGEST) for whole in full_texts], dtype=np.int64)
            is_shorter = (ends > 0) & (ends < longest[numbers])
            is_first = is_shorter & ((searched == 0) | (ends == searched))
            results = np.zeros(len(indices), dtype=np.int64)
            np.bitwise_or.at(results, numbers[is_first], 1 << ends[is_first])
            return results

        return self.table.computed(keys, compute)

    def _tried(self, whole: str) -> Iterator[tuple[int, str]]:
        """Yield texts that may begin with a shorter token, and its length; 0 for any."""
        yield 0, whole
        token = self._merges.token_of(whole)
        for after in self._merges.dividing(token) if token is not None else ():
            yield 0, whole + after
        if whole[-1].isspace() and whole[-1].isascii():
            yield 0, whole + WORD
        if token is not None and len(self._merges) and whole.isascii() and whole.strip().isalpha():
            return  # merges show all that divides a word
        for length in range(1, min(len(whole), LONGEST)):
            if not self._vocabulary.is_token(whole[:length]):
                continue
            for longer in self._vocabulary.frequent_tokens(whole[length:], TRIED):
                yield length, whole[:length] + longer
