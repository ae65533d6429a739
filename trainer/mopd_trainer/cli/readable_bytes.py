"""The bytes of a token as a person reads them: whole characters as such, the rest escaped."""

import unicodedata

#: Stands for a space, which nobody sees at the end of a token.
SPACE = "␣"
_NAMED = {" ": SPACE, "\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\", SPACE: "\\u2423"}


def readable(spelled: bytes) -> str:
    """One line without spaces. Half characters are ``\\xe7``; what has no shape is ``\\u200d``.

    A mark that would sit on the character before it is escaped where it begins the token.
    """
    text = spelled.decode(errors="surrogateescape")
    return "".join(
        _shown(character, is_first=position == 0) for position, character in enumerate(text)
    )


def _shown(character: str, *, is_first: bool) -> str:
    if character in _NAMED:
        return _NAMED[character]
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # surrogateescape: a byte of no character
        return f"\\x{code - 0xDC00:02x}"
    if not character.isprintable() or (is_first and _sits_on_another(character)):
        return f"\\x{code:02x}" if code < 0x80 else character.encode("unicode_escape").decode()
    return character


def _sits_on_another(character: str) -> bool:
    return unicodedata.category(character) in ("Mn", "Me", "Mc")
