"""Tokens as JSON values, for pages and logs: ids, bytes in hexadecimal, control tokens."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TokenTable


def token_listing(sequence: TokenSequence, limit: int | None = None) -> dict[str, Any]:
    """Return the number of tokens, and the ids, bytes and marks of the first ``limit``.

    A token may end inside a character, so that bytes are in hexadecimal.
    """
    text, ends = sequence.text, sequence.byte_ends[:limit].tolist()
    return {
        "count": len(sequence),
        "ids": sequence.token_ids[:limit].tolist(),
        "bytes": [text[start:end].hex() for start, end in pairwise([0, *ends])],
        "marks": {
            str(position): name for position, name in sequence.marks.items() if position < len(ends)
        },
    }


def spellings(table: TokenTable, token_ids: Iterable[int]) -> dict[str, str]:
    """Return the bytes of tokens in hexadecimal, of a control token its literal text in ``<>``."""
    literal = {token_id: name for name, token_id in table.controls.items()}
    return {
        str(token_id): f"<{literal.get(token_id, table.marks[token_id])}>"
        if token_id in table.marks
        else table.bytes_of(token_id).hex()
        for token_id in sorted({*token_ids})
    }
