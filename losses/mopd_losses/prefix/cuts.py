"""``Cuts``: how much of a teacher's candidate a single token of the student decides.

A candidate is text that the teacher considers next. The student may decide only its beginning with
one token: ``2024`` is `` 20|24`` for one tokenizer and `` 202|4`` for another. The event that both
sides can name is the candidate up to the end of the first student token that reaches beyond the
boundary, in the student's tokenization of the text that its open token has begun, the candidate,
and any of a few continuations.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.vocabulary.hashed_strings import (
    Hashes,
    Integers,
    keys_of,
    string_hashes,
)
from mopd_losses.prefix.vocabulary.key_table import KeyTable
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary, utf8_text
from mopd_protocol.tokenizers.token_table import TextEncoder

#: Continuations of a candidate: none, digits, letters, a space, punctuation. A tokenizer that
#: merges across the candidate's end shows it with one of them.
CONTINUATIONS = ("", "0", "1", "4", "6", "9", "a", "s", " ", ",")

#: Cuts kept in memory; beyond, all are discarded and computed again.
CACHED_CUTS = 500_000

#: Longer tokens that are tried for a candidate that is not a token, those with the lowest ids.
COVERING = 8

#: Last characters that are compared.
_COMPARED = 4

#: The text between the start of the student's open token and the boundary, and a candidate.
Begun = tuple[str, str]


class Cuts:
    """Cuts of candidates by one student's tokenizer."""

    def __init__(self, student: SortedVocabulary, encoder: TextEncoder) -> None:
        self._student = student
        self._encoder = encoder
        self.table = KeyTable(CACHED_CUTS)
        self._whole = KeyTable(CACHED_CUTS)
        last = tuple(filter(None, CONTINUATIONS))
        self._merged = {token[-_COMPARED:] for token in student.strings if token.endswith(last)}

    def of(self, keys: Hashes, candidate: Callable[[int], Begun]) -> Integers:
        """Return the characters of each candidate that one token decides; 0 if no token reaches
        beyond what was begun. Unknown ones take one call of the tokenizer.

        Args:
            keys: of a beginning and a candidate.
            candidate: index of a key -> its strings.
        """

        def compute(indices: Integers) -> Integers:
            return np.array(self._cuts([candidate(index) for index in indices.tolist()]))

        return self.table.computed(keys, compute)

    def are_divided(self, keys: Hashes, candidate: Callable[[int], Begun]) -> NDArray[np.bool_]:
        """Return whether the tokenizer spells each candidate with a token that ends inside it, and
        so do the frequent tokens that begin with it: a token that covers it is never written.

        Args:
            keys: of a beginning and a candidate, joined.
            candidate: see ``of``.
        """

        def compute(indices: Integers) -> Integers:
            whole = ["".join(candidate(index)) for index in indices.tolist()]
            firsts = self._first_tokens(whole)
            # A normaliser may have changed the text; such a token does not apply to this text.
            divided = [
                token is not None and token != text and text.startswith(token)
                for token, text in zip(firsts, whole, strict=True)
            ]
            longer = [
                (index, token)
                for index, text in enumerate(whole)
                if divided[index]
                for token in self._student.frequent_tokens(text, COVERING)
            ]
            tokens = self._first_tokens([token for _, token in longer])
            for (index, _), token in zip(longer, tokens, strict=True):
                divided[index] &= token is not None and not token.startswith(whole[index])
            return np.array(divided, dtype=np.int64)

        return self._whole.computed(keys, compute) == 1

    def _first_tokens(self, texts: Sequence[str]) -> list[str | None]:
        """Return the first token of each text, by the tokenizer; None without one."""
        decoded = [utf8_text(text) for text in texts]
        encoded = iter(self._encoder.encode_batch([t for t in decoded if t is not None]))
        written = [next(encoded) if text is not None else () for text in decoded]
        return [self._student.strings[ids[0]] if ids else None for ids in written]

    def of_candidates(self, begun: str, candidates: Sequence[str]) -> list[int]:
        """Return the same for candidates behind one beginning."""
        before, length = np.repeat(string_hashes([begun]), len(candidates)), len(begun)
        keys = keys_of(before, np.full(len(candidates), length), string_hashes(candidates))
        return self.of(keys, lambda index: (begun, candidates[index])).tolist()

    def _cuts(self, pairs: list[Begun]) -> list[int]:
        lengths = self._first_token_lengths(pairs)
        cuts: list[int] = []
        for begun, candidate in pairs:
            decided = lengths[begun, candidate]
            if self._student.covers(begun + candidate):
                decided.append(len(candidate))
            cuts.append(min(*decided, len(candidate)) if decided else 0)
        return cuts

    def _first_token_lengths(self, pairs: list[Begun]) -> dict[Begun, list[int]]:
        """Characters of the candidate within the first token, for each continuation."""
        texts: list[str] = []
        owners: list[Begun] = []
        for begun, candidate in pairs:
            text = begun + candidate
            tried = [c for c in CONTINUATIONS if not c or self._may_merge(text, c)]
            texts += [text + continuation for continuation in tried]
            owners += [(begun, candidate)] * len(tried)
        lengths: dict[Begun, list[int]] = {pair: [] for pair in pairs}
        for owner, first in zip(owners, self._first_tokens(texts), strict=True):
            begun, text = owner[0], "".join(owner)
            # A normaliser may have changed the text; such a token does not apply to this text.
            if first is None or len(first) <= len(begun):
                continue
            if text.startswith(first) or first.startswith(text):
                lengths[owner].append(len(first) - len(begun))
        return lengths

    def _may_merge(self, text: str, continuation: str) -> bool:
        """Return whether a token may consist of the end of a text and a continuation; without one,
        the tokens of the text stay as they are, if it ends inside a word."""
        if not (text[-1].isascii() and text[-1].isalnum()):
            return True
        ends = (text[-length:] + continuation for length in range(1, _COMPARED))
        return any(end in self._merged for end in ends)
