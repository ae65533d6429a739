"""The bytes that a token spells, written from the published rules, one character at a time."""

import re

from tokenizers import Tokenizer


def byte_level_character(byte: int) -> str:
    """GPT-2: a printable Latin-1 byte stands for itself, the n-th other byte is U+0100 + n."""
    if _is_printable(byte):
        return chr(byte)
    return chr(0x100 + sum(not _is_printable(smaller) for smaller in range(byte)))


def byte_level_bytes(surface: str) -> bytes:
    """Each character looked for among the 256; nothing is precomputed."""
    spelled: list[int] = []
    for character in surface:
        spelled.extend(byte for byte in range(256) if byte_level_character(byte) == character)
    return bytes(spelled)


def sentencepiece_bytes(surface: str) -> bytes:
    """SentencePiece: ``<0xNN>`` is one byte, ``▁`` is a space, everything else is itself."""
    if re.fullmatch("<0x[0-9A-F][0-9A-F]>", surface):
        return bytes.fromhex(surface[3:5])
    spelled = b""
    for character in surface:
        spelled += b" " if character == "\u2581" else character.encode("utf-8")
    return spelled


def token_bytes(tokenizer: Tokenizer, token_id: int, *, byte_level: bool) -> bytes:
    """The bytes of one token of a live tokenizer: nothing where it is special."""
    surface = tokenizer.id_to_token(token_id)
    assert surface is not None
    added = tokenizer.get_added_tokens_decoder().get(token_id)
    if added is not None:
        if added.special:
            return b""
        # Byte-level vocabularies add plain text, SentencePiece ones add surfaces.
        return added.content.encode() if byte_level else sentencepiece_bytes(added.content)
    return byte_level_bytes(surface) if byte_level else sentencepiece_bytes(surface)


def running_ends(pieces: list[bytes]) -> list[int]:
    """End offset of each piece in their concatenation."""
    return [len(b"".join(pieces[: position + 1])) for position in range(len(pieces))]


def _is_printable(byte: int) -> bool:
    """Latin-1 characters with ink: not controls, not spaces, not the soft hyphen (0xAD)."""
    return 0x21 <= byte <= 0x7E or (0xA1 <= byte <= 0xFF and byte != 0xAD)
