"""``Vocabulary``: the strings of one side's tokens, and how its tokenizer divides text."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import nsmallest
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_strings import FIRST_CONTROL, is_continuation, utf8_text
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable

#: A control token of a string.
CONTROLS = f"[{chr(FIRST_CONTROL)}-\U0010ffff]"

#: Sorts behind every character of a string.
_HIGHEST = "\U0010ffff"


def is_control(character: str) -> bool:
    """Return whether a character of a string is a control token."""
    return ord(character) >= FIRST_CONTROL


class Vocabulary:
    """The tokens of one side.

    Args:
        controls: name of a control token -> its private character.
    """

    def __init__(
        self, table: TokenTable, encoder: TextEncoder, controls: Mapping[str, str]
    ) -> None:
        self.strings = [spelled.decode("latin-1") for spelled in table.all_bytes]  # by id
        for token_id, name in table.marks.items():
            self.strings[token_id] = controls[name]
        self._controls = controls
        self._encoder = encoder
        # The first of several tokens that end the turn names the event.
        self.control_ids = {controls[name]: token_id for token_id, name in table.marks.items()}
        self.control_ids |= {
            self.strings[token_id]: token_id for token_id in table.roles.ending[:1]
        }

    def string(self, token_id: int) -> str:
        """Return the string of a token; empty for an id of a padded head."""
        return self.strings[token_id] if token_id < len(self.strings) else ""

    def spelled(self, token_ids: Iterable[int]) -> str:
        """Return the string of tokens in succession."""
        return "".join(self.strings[token] for token in token_ids)

    def string_of(self, sequence: TokenSequence) -> tuple[str, list[int]]:
        """Return the string of a token sequence, and where each token begins in it."""
        text = sequence.text.decode("latin-1")
        pieces = [text[a:b] for a, b in pairwise([0, *sequence.byte_ends.tolist()])]
        for position, name in sequence.marks.items():
            pieces[position] = self._controls[name]
        return "".join(pieces), [0, *accumulate(map(len, pieces))][:-1]

    @cached_property
    def _sorted(self) -> tuple[list[str], list[int]]:
        """Strings in order, and their ids."""
        order = sorted(
            (token for token, string in enumerate(self.strings) if string),
            key=self.strings.__getitem__,
        )
        return [self.strings[token] for token in order], order

    def longer_tokens(self, string: str, most: int) -> list[int]:
        """Return tokens that begin with a string and are longer: those with the lowest ids."""
        strings, ids = self._sorted
        start = bisect_left(strings, string)
        stop = bisect_left(strings, string + _HIGHEST)
        while start < stop and len(strings[start]) == len(string):
            start += 1
        return nsmallest(most, ids[start:stop])

    @cached_property
    def _contained(self) -> NDArray[np.bool_]:
        """[256, 256], whether a token contains one byte behind the other."""
        contained = np.zeros((256, 256), dtype=np.bool_)
        for string in self.strings:
            if len(string) > 1 and not is_control(string[0]):
                codes = np.frombuffer(string.encode("latin-1"), dtype=np.uint8)
                contained[codes[:-1], codes[1:]] = True
        return contained

    def joins(self, before: str, after: str) -> bool:
        """Return whether a token may contain two neighbouring characters of a string: if not,
        text is divided between them, and both parts independently of each other."""
        first, second = ord(before), ord(after)
        if max(first, second) >= FIRST_CONTROL:
            return False
        # Half a character is not text.
        return is_continuation(second) or bool(self._contained[first, second])

    def texts(self) -> Iterator[str]:
        """Yield the tokens that are text."""
        return (text for text in map(utf8_text, self.strings) if text)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        return self._encoder.encode_batch(texts)
