"""``Spelling``: how one tokenizer writes given bytes, remembered for every string it was asked.

Bytes are held as Latin-1 strings here, one character a byte, so that control tokens can stand
among them as characters of their own (above 255) and nothing that spells bytes ever meets them.
"""

from collections.abc import Sequence
from itertools import pairwise

from mopd_protocol.token_table import TextEncoder, TokenTable

#: Strings whose spelling is remembered; beyond, all are forgotten and asked anew.
MOST_REMEMBERED = 1_000_000


class Spelling:
    """Bytes -> the tokens of one vocabulary that its tokenizer writes them with.

    Half characters, and text that a normalizer would change, are written with the longest token
    that fits, again and again.
    """

    def __init__(self, table: TokenTable, encoder: TextEncoder) -> None:
        self._encoder = encoder
        self.tokens = [spelled.decode("latin-1") for spelled in table.all_bytes]  # by id
        self.ids: dict[str, list[int]] = {}  # all ids that spell a string
        for token_id, token in enumerate(self.tokens):
            if token:
                self.ids.setdefault(token, []).append(token_id)
        self._longest = max(map(len, self.ids), default=0)
        self._known: dict[str, tuple[str, ...]] = {}

    def pieces(self, text: str) -> tuple[str, ...]:
        """The tokens of ``text``; empty where not even its single bytes are tokens."""
        found = self._known.get(text)
        if found is None:
            self.learn([text])
            found = self._known[text]
        return found

    def learn(self, texts: Sequence[str]) -> None:
        """Writes many strings at once, which is far cheaper than one by one."""
        if len(self._known) > MOST_REMEMBERED:
            self._known.clear()
        asked = [text for text in dict.fromkeys(texts) if text not in self._known]
        if not asked:
            return
        readable = {text: characters for text in asked if (characters := _characters(text))}
        if len(readable) == 1:  # far cheaper than a batch of one
            written = [self._encoder.encode(text) for text in readable.values()]
        else:
            written = self._encoder.encode_batch(list(readable.values()))
        for text, token_ids in zip(readable, written, strict=True):
            pieces = tuple(self.tokens[token_id] for token_id in token_ids)
            if "".join(pieces) == text:
                self._known[text] = pieces
        for text in asked:
            if text not in self._known:
                self._known[text] = self._longest_first(text)

    def goes_beyond(self, before: str, after: str) -> str:
        """The first token of ``before + after`` if it reaches beyond ``before``, else nothing."""
        tokens = range(len(before) + 1, len(before + after) + 1)
        if not any((before + after)[:end] in self.ids for end in tokens):
            return ""
        pieces = self.pieces(before + after)
        return pieces[0] if pieces and len(pieces[0]) > len(before) else ""

    def inner_boundaries(self, text: str) -> list[int]:
        """Where a token ends inside ``text``, in bytes from its start."""
        at, ends = 0, list[int]()
        for piece, _ in pairwise(self.pieces(text)):
            at += len(piece)
            ends.append(at)
        return ends

    def _longest_first(self, text: str) -> tuple[str, ...]:
        pieces: list[str] = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self.ids), None)
            if end is None:
                return ()
            pieces.append(text[at:end])
            at = end
        return tuple(pieces)


def _characters(text: str) -> str | None:
    try:
        return text.encode("latin-1").decode()
    except UnicodeDecodeError:
        return None
