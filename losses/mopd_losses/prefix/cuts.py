"""``Cuts``: how much of a teacher's candidate a single token of the student decides.

A candidate is text that the teacher considers next. The student may decide only its beginning with
one token: ``2024`` is `` 20|24`` for one tokenizer and `` 202|4`` for another. The event that both
sides can name is the candidate up to the end of the first student token that reaches beyond the
boundary, in the student's tokenization of the text that its open token has begun, the candidate,
and any of a few continuations.
"""

from collections.abc import Iterable

from mopd_losses.prefix.sorted_vocabulary import SortedVocabulary, utf8_text
from mopd_protocol.tokenizers.token_table import TextEncoder

#: Continuations of a candidate: none, digits, letters, a space, punctuation. A tokenizer that
#: merges across the candidate's end shows it with one of them.
CONTINUATIONS = ("", "0", "1", "4", "6", "9", "a", "s", " ", ",")

#: Cuts kept in memory; beyond, all are discarded and computed again.
_CACHED_CUTS = 500_000

#: The text between the start of the student's open token and the boundary, and a candidate.
Begun = tuple[str, str]


class Cuts:
    """Cuts of candidates by one student's tokenizer."""

    def __init__(self, student: SortedVocabulary, encoder: TextEncoder) -> None:
        self._student = student
        self._encoder = encoder
        self._cuts: dict[Begun, int] = {}

    def prepare(self, candidates: Iterable[Begun]) -> None:
        """Compute the cuts of these pairs, with one call of the tokenizer."""
        pairs = dict.fromkeys(candidates)
        missing = [pair for pair in pairs if pair not in self._cuts]
        if len(self._cuts) + len(missing) > _CACHED_CUTS:
            self._cuts.clear()
            missing = list(pairs)
        lengths = self._first_token_lengths(missing)
        for begun, candidate in missing:
            decided = lengths[begun, candidate]
            if self._student.covers(begun + candidate):
                decided.append(len(candidate))
            self._cuts[begun, candidate] = min(*decided, len(candidate)) if decided else 0

    def of(self, begun: str, candidate: str) -> int:
        """Return the characters of ``candidate`` that one token decides; 0 if no token reaches
        beyond ``begun``. The pair must have been prepared."""
        return self._cuts[begun, candidate]

    def _first_token_lengths(self, pairs: list[Begun]) -> dict[Begun, list[int]]:
        """Characters of the candidate within the first token, for each continuation."""
        texts: list[str] = []
        owners: list[Begun] = []
        for begun, candidate in pairs:
            text = utf8_text(begun + candidate)
            if text is None:
                continue
            texts += [text + continuation for continuation in CONTINUATIONS]
            owners += [(begun, candidate)] * len(CONTINUATIONS)
        lengths: dict[Begun, list[int]] = {pair: [] for pair in pairs}
        strings = self._student.strings
        for owner, ids in zip(owners, self._encoder.encode_batch(texts), strict=True):
            first = strings[ids[0]] if ids else ""
            begun, text = owner[0], "".join(owner)
            # A normaliser may have changed the text; such a token does not apply to this text.
            if len(first) > len(begun) and (text.startswith(first) or first.startswith(text)):
                lengths[owner].append(len(first) - len(begun))
        return lengths
