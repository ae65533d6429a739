"""What each token of a text shows of it; tokens may begin and end inside a character."""

import unicodedata
from collections.abc import Sequence
from itertools import accumulate, pairwise

_LINE_END = "↵"


def token_texts(tokens: Sequence[bytes]) -> list[str]:
    """One string a token; together they are the text.

    A character whose bytes are spread over several tokens is shown by the one that ends it, and
    those before it by nothing. Bytes of no character are ``\\xe7``, and so is what has no shape or
    would turn the text around; a line's end can be seen before it ends the line.
    """
    text = b"".join(tokens)
    ends = [*accumulate(len(token) for token in tokens)]
    characters = text.decode("utf-8", "surrogateescape")
    lengths = [1 if _is_byte(each) else len(each.encode()) for each in characters]
    character_ends = [*accumulate(lengths)]
    shown: list[str] = []
    at = 0
    for start, end in pairwise([0, *ends]):
        first = at
        while at < len(characters) and start < character_ends[at] <= end:
            at += 1
        shown.append("".join(_shown(each) for each in characters[first:at]))
    return shown


def _is_byte(character: str) -> bool:
    """Whether it stands for a byte that belongs to no character (``surrogateescape``)."""
    return 0xDC80 <= ord(character) <= 0xDCFF


def _shown(character: str) -> str:
    if character == "\n":
        return f"{_LINE_END}\n"
    if _is_byte(character):
        return f"\\x{ord(character) - 0xDC00:02x}"
    turns = unicodedata.bidirectional(character) in _TURNING
    if (unicodedata.category(character) == "Cc" and character != "\t") or turns:
        return character.encode("unicode_escape").decode()
    return character


#: Characters that change the direction of others.
_TURNING = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
