"""``CanonicalTokens``: whether the tokens of a completion are those of the side's tokenizer."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.text.contexts import Contexts, TextsBefore
from mopd_losses.prefix.vocabulary.hashed_strings import Integers, keys_of
from mopd_losses.prefix.vocabulary.key_table import KeyTable
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary
from mopd_losses.prefix.vocabulary.spellings import Spellings
from mopd_protocol.tokenizers.token_table import TextEncoder

#: Contexts kept in memory; beyond, all are discarded and computed again.
CACHED = 500_000

Flags = NDArray[np.bool_]


class CanonicalTokens:
    """Compares the tokens of one side with its tokenizer's."""

    def __init__(self, vocabulary: SortedVocabulary, encoder: TextEncoder) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._canonical = KeyTable(CACHED)
        self._whole = KeyTable(CACHED)

    def are_one_token(self, contexts: Contexts, boundaries: Integers, lengths: Integers) -> Flags:
        """Return whether one token spells the text after each boundary, and perhaps what is before
        it: the sampled one, or the tokenizer's.

        Args:
            lengths: characters of the text, at most up to the end of the sampled token.
        """
        text, offsets = contexts.text, contexts.places.offsets[boundaries]
        stops = offsets + lengths
        results = text.ends[contexts.covering_rows[boundaries]] == stops
        longer = np.flatnonzero(~results)
        keys = keys_of(
            contexts.keys[boundaries[longer]], text.slices(offsets[longer], stops[longer])
        )

        def compute(indices: Integers) -> Integers:
            rows = longer[indices]
            return self._are_one(contexts, boundaries[rows], lengths[rows]).astype(np.int64)

        results[longer] = self._whole.computed(keys, compute) == 1
        return results

    def _are_one(self, contexts: Contexts, boundaries: Integers, lengths: Integers) -> Flags:
        """``are_one_token`` by the tokenizer."""
        symbols, offsets = contexts.text.symbols, contexts.places.offsets[boundaries]
        starts = offsets - contexts.lengths[boundaries]
        stops = offsets + lengths
        texts = [symbols[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
        spelled = Spellings.of(self._vocabulary, self._encoder, texts)
        reaching = np.flatnonzero(spelled.ends >= (stops - starts)[spelled.owners])
        owners, first = np.unique(spelled.owners[reaching], return_index=True)
        tokens = reaching[first]
        begins = spelled.ends[tokens] - self._vocabulary.lengths[spelled.ids[tokens]]
        results = np.zeros(len(texts), dtype=np.bool_)
        results[owners] = begins <= (offsets - starts)[owners]
        return results

    def keep(self, ids: Integers, before: str, texts: Sequence[str]) -> Flags:
        """Return whether the tokenizer writes tokens in front of each text.

        Args:
            before: the text of these tokens.
        """
        full_texts = [before + text for text in texts]
        spelled = Spellings.of(self._vocabulary, self._encoder, full_texts)
        inside = np.flatnonzero(spelled.steps < len(ids))
        equal = inside[ids[spelled.steps[inside]] == spelled.ids[inside]]
        return np.bincount(spelled.owners[equal], minlength=len(texts)) == len(ids)

    def first_ends(self, texts: Sequence[str]) -> Integers:
        """Return the ends of the first tokens of texts."""
        return Spellings.of(self._vocabulary, self._encoder, texts).first_ends()

    def are_canonical(self, contexts: TextsBefore, boundaries: Integers) -> Flags:
        """Return whether the tokens of each context are the tokenizer's.

        After others, which a student may sample, most of the mass of the text is on the tokenizer's
        path: nothing would be compared.
        """

        text = contexts.text

        def compute(indices: Integers) -> Integers:
            numbers = boundaries[indices]
            texts = contexts.written(numbers)
            spelled = Spellings.of(self._vocabulary, self._encoder, texts)
            rows = contexts.first_rows[numbers][spelled.owners] + spelled.steps
            counts = contexts.counts(numbers)
            equal = text.ids[np.minimum(rows, len(text.ids) - 1)] == spelled.ids
            equal &= spelled.steps < counts[spelled.owners]
            equals = np.bincount(spelled.owners[equal], minlength=len(texts))
            return (spelled.is_text & (equals == counts)).astype(np.int64)

        return self._canonical.computed(contexts.written_keys(boundaries), compute) == 1
