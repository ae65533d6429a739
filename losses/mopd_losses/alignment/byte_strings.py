"""Strings of bytes as Latin-1 characters, with one private character for each control token.

A private character is above every byte, and the same in all vocabularies that have the name.
"""

from mopd_protocol.tokenizers.token_table import TokenTable

#: The private character of the first control token.
FIRST_CONTROL = 0x100


def utf8_text(string: str) -> str | None:
    """Return the text of a string of bytes; None for a control token or half a character, which no
    tokenizer takes as text."""
    try:
        return string.encode("latin-1").decode()
    except UnicodeError:
        return None


def is_continuation(byte: int) -> bool:
    """Return whether a byte continues a character of UTF-8."""
    return 0x80 <= byte < 0xC0


def control_characters(*tables: TokenTable) -> dict[str, str]:
    """Return the private character of each control token's name."""
    names = sorted({name for table in tables for name in table.marks.values()})
    return {name: control_character(number) for number, name in enumerate(names)}


def control_character(number: int) -> str:
    """Return the private character of the control token with this number."""
    return chr(FIRST_CONTROL + number)
