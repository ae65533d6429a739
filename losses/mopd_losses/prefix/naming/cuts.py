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
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary
from mopd_losses.prefix.vocabulary.spellings import Spellings
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

#: The cut of a candidate of which no token decides anything.
_UNDECIDED = 1 << 32

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
            return self._cuts([candidate(index) for index in indices.tolist()])

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
            ends, lengths = self._first_ends(whole), np.array(list(map(len, whole)))
            divided = (ends > 0) & (ends < lengths)
            owners, longer = [], list[str]()
            for index in np.flatnonzero(divided).tolist():
                tokens = self._student.frequent_tokens(whole[index], COVERING)
                owners += [index] * len(tokens)
                longer += tokens
            covering = np.array(owners, dtype=np.int64)
            divided[covering[self._first_ends(longer) >= lengths[covering]]] = False
            return divided.astype(np.int64)

        return self._whole.computed(keys, compute) == 1

    def _first_ends(self, strings: Sequence[str]) -> Integers:
        """[strings], the end of the tokenizer's first token; 0 if it does not spell the string."""
        return Spellings.of(self._student, self._encoder, strings).first_ends()

    def of_candidates(self, begun: str, candidates: Sequence[str]) -> list[int]:
        """Return the same for candidates after one beginning."""
        return self.of_pairs([(begun, candidate) for candidate in candidates]).tolist()

    def of_pairs(self, pairs: Sequence[Begun]) -> Integers:
        """Return the same for beginnings and candidates by their strings."""
        begun, candidates = [each[0] for each in pairs], [each[1] for each in pairs]
        lengths = np.fromiter(map(len, begun), dtype=np.int64, count=len(begun))
        keys = keys_of(string_hashes(begun), lengths, string_hashes(candidates))
        return self.of(keys, pairs.__getitem__)

    def _cuts(self, pairs: list[Begun]) -> Integers:
        """Take the shortest beginning of each candidate within the first token, over the
        continuations."""
        texts: list[str] = []
        owners: list[int] = []
        for index, pair in enumerate(pairs):
            text = "".join(pair)
            tried = [c for c in CONTINUATIONS if not c or self._may_merge(text, c)]
            texts += [text + continuation for continuation in tried]
            owners += [index] * len(tried)
        begun, lengths = np.array([list(map(len, pair)) for pair in pairs]).reshape(-1, 2).T
        decided = self._first_ends(texts) - begun[owners]
        cuts = np.array(
            [
                length if self._student.covers("".join(pair)) else _UNDECIDED
                for pair, length in zip(pairs, lengths.tolist(), strict=True)
            ]
        )
        np.minimum.at(cuts, owners, np.where(decided > 0, decided, _UNDECIDED))
        return np.where(cuts == _UNDECIDED, 0, np.minimum(cuts, lengths))

    def _may_merge(self, text: str, continuation: str) -> bool:
        """Return whether a token may consist of the end of a text and a continuation; without one,
        the tokens of the text stay as they are, if it ends inside a word."""
        if not (text[-1].isascii() and text[-1].isalnum()):
            return True
        ends = (text[-length:] + continuation for length in range(1, _COMPARED))
        return any(end in self._merged for end in ends)
