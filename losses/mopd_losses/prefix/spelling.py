"""``Spelling``: how one tokenizer writes given bytes, remembered for every string it was asked.

Bytes are held as Latin-1 strings here, one character a byte, so that control tokens can stand
among them as characters of their own (above 255) and nothing that spells bytes ever meets them.
"""

from collections.abc import Sequence
from itertools import pairwise

from mopd_losses.projection.segmentation import Segmentation
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable

#: Strings whose spelling is remembered; beyond, all are forgotten and asked anew.
MOST_REMEMBERED = 500_000


class Spelling:
    """Strings -> the tokens of one vocabulary that its tokenizer writes them with."""

    def __init__(self, table: TokenTable, encoder: TextEncoder) -> None:
        self.tokens = [spelled.decode("latin-1") for spelled in table.all_bytes]  # by id
        self.ids: dict[str, list[int]] = {}  # all ids that spell a string
        for token_id, token in enumerate(self.tokens):
            if token:
                self.ids.setdefault(token, []).append(token_id)
        exact = {table.all_bytes[ids[0]]: ids[0] for ids in self.ids.values()}
        self._segmentation = Segmentation(table, encoder, exact)
        self._known: dict[str, tuple[str, ...]] = {}
        self._first: dict[str, int] = {}

    def pieces(self, text: str) -> tuple[str, ...]:
        """The tokens of ``text``; empty where not even its single bytes are tokens."""
        found = self._known.get(text)
        if found is None:
            found = self._remember(text, self._segmentation.of(text.encode("latin-1")))
        return found

    def learn(self, texts: Sequence[str]) -> None:
        """Writes many strings at once, by all cores."""
        asked = [text for text in dict.fromkeys(texts) if text not in self._known]
        spellings = [text.encode("latin-1") for text in asked]
        for text, written in zip(asked, self._segmentation.of_all(spellings), strict=True):
            self._remember(text, written)

    def first_end(self, text: str) -> int:
        """Where the first token of ``text`` ends; 0 where it has none."""
        end = self._first.get(text)
        if end is None:
            pieces = self._segmentation.of(text.encode("latin-1"))
            end = len(self.tokens[pieces[0]]) if pieces else 0
            if len(self._first) > MOST_REMEMBERED:
                self._first.clear()
            self._first[text] = end
        return end

    def goes_beyond(self, before: str, after: str) -> bool:
        """Whether the first token of ``before + after`` reaches beyond ``before``."""
        whole = before + after
        ends = range(len(before) + 1, len(whole) + 1)
        if not any(whole[:end] in self.ids for end in ends):
            return False
        return self.first_end(whole) > len(before)

    def inner_boundaries(self, text: str) -> list[int]:
        """Where a token ends inside ``text``, in bytes from its start."""
        at, ends = 0, list[int]()
        for piece, _ in pairwise(self.pieces(text)):
            at += len(piece)
            ends.append(at)
        return ends

    def _remember(self, text: str, written: Sequence[int]) -> tuple[str, ...]:
        if len(self._known) > MOST_REMEMBERED:
            self._known.clear()
        found = self._known[text] = tuple(self.tokens[token_id] for token_id in written)
        return found
