"""``Segmentation``: how one tokenizer writes given bytes."""

from collections.abc import Iterator, Mapping, Sequence

from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable


class Segmentation:
    """Bytes -> token ids: the tokenizer's own, where the bytes are text that it keeps.

    Half characters, and text that its normalizer would change, are spelled by the longest token
    that fits, again and again.

    Args:
        exact: bytes -> the id that spells them, for pieces that the tokenizer does not encode.
    """

    def __init__(self, table: TokenTable, encoder: TextEncoder, exact: Mapping[bytes, int]) -> None:
        self._bytes = table.all_bytes
        self._encoder = encoder
        self._exact = exact
        self._longest = max(map(len, exact), default=0)

    def of(self, spelled: bytes) -> list[int]:
        """The tokens of one spelling; empty when not even a single byte is a token."""
        text = as_text(spelled)
        return self._checked(spelled, None if text is None else self._encoder.encode(text))

    def of_all(self, spellings: Sequence[bytes]) -> Iterator[list[int]]:
        """The tokens of each spelling, by one call of the tokenizer."""
        texts = [as_text(spelled) for spelled in spellings]
        encodable = [text for text in texts if text is not None]
        written = iter(self._encoder.encode_batch(encodable))
        for spelled, text in zip(spellings, texts, strict=True):
            yield self._checked(spelled, None if text is None else next(written))

    def _checked(self, spelled: bytes, written: list[int] | None) -> list[int]:
        if written is not None and b"".join(map(self._bytes.__getitem__, written)) == spelled:
            return written
        return self._longest_first(spelled)

    def _longest_first(self, spelled: bytes) -> list[int]:
        pieces: list[int] = []
        at = 0
        while at < len(spelled):
            ends = range(min(len(spelled), at + self._longest), at, -1)
            end = next((end for end in ends if spelled[at:end] in self._exact), None)
            if end is None:
                return []
            pieces.append(self._exact[spelled[at:end]])
            at = end
        return pieces


def as_text(spelled: bytes) -> str | None:
    """The characters that bytes spell, or None for half ones."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return None
