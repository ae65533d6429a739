"""``Vocabulary``: the strings of one side's tokens, and how its tokenizer divides text."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import nsmallest
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_strings import FIRST_CONTROL, utf8_text
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable

#: A control token of a string.
CONTROLS = f"[{chr(FIRST_CONTROL)}-\U0010ffff]"

#: The code of all control tokens.
CONTROL_CODE = 256

#: Sorts behind every character of a string.
_HIGHEST = "\U0010ffff"


def is_control(character: str) -> bool:
    """Return whether a character of a string is a control token."""
    return ord(character) >= FIRST_CONTROL


def character_codes(string: str) -> NDArray[np.int64]:
    """Return the byte of each character of a string, or ``CONTROL_CODE``."""
    codes = np.frombuffer(string.encode("utf-32-le"), dtype=np.uint32).astype(np.int64)
    return np.minimum(codes, CONTROL_CODE)


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

    @property
    def size(self) -> int:
        """Number of ids; one more stands for all ids of a padded head."""
        return len(self.strings)

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
        start, stop = self.ranks_behind(string)
        while start < stop and len(strings[start]) == len(string):
            start += 1
        return nsmallest(most, ids[start:stop])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[size + 1], characters of each token."""
        return np.array([*map(len, self.strings), 0], dtype=np.int64)

    @cached_property
    def ranks(self) -> NDArray[np.int64]:
        """[size + 1], place of each token in the order of strings; -1 without one."""
        _, order = self._sorted
        ranks = np.full(self.size + 1, -1, dtype=np.int64)
        ranks[order] = np.arange(len(order))
        return ranks

    def ranks_behind(self, prefix: str) -> tuple[int, int]:
        """Return the range of ranks of the tokens that begin with a string."""
        strings, _ = self._sorted
        return bisect_left(strings, prefix), bisect_left(strings, prefix + _HIGHEST)

    def beginnings(self, string: str) -> list[int]:
        """Return the tokens with which a string begins."""
        strings, ids = self._sorted
        tokens: list[int] = []
        for end in range(1, len(string) + 1):
            prefix = string[:end]
            at = bisect_left(strings, prefix)
            while at < len(strings) and strings[at] == prefix:
                tokens.append(ids[at])
                at += 1
        return tokens

    @cached_property
    def _characters(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Codes of all tokens' characters in succession, and where each token begins in them."""
        starts = np.cumsum(self.lengths) - self.lengths
        return character_codes("".join(self.strings) + _HIGHEST), starts

    def codes_at(self, tokens: NDArray[np.int64], at: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """Return the code of a character of each token, see ``character_codes``."""
        codes, starts = self._characters
        return codes[starts[tokens] + at]

    @cached_property
    def events(self) -> NDArray[np.int64]:
        """[size], the token that stands for each: all that end the turn are one."""
        events = np.arange(self.size)
        for token, string in enumerate(self.strings):
            events[token] = self.control_ids.get(string, token)
        return events

    @cached_property
    def joinable(self) -> NDArray[np.bool_]:
        """[257, 257], ``joins`` of two codes of ``character_codes``."""
        table = np.zeros((CONTROL_CODE + 1,) * 2, dtype=np.bool_)
        codes, _ = self._characters
        is_first = np.zeros(len(codes), dtype=np.bool_)
        is_first[np.cumsum(self.lengths)] = True
        inside = np.flatnonzero(~is_first[1:])
        table[codes[inside], codes[inside + 1]] = True
        table[:CONTROL_CODE, 0x80:0xC0] = True  # half a character is not text
        return table

    def joins(self, before: str, after: str) -> bool:
        """Return whether a token may contain two neighbouring characters of a string: if not,
        text is divided between them, and both parts independently of each other."""
        codes = (min(ord(each), CONTROL_CODE) for each in (before, after))
        return bool(self.joinable[*codes])

    def texts(self) -> Iterator[str]:
        """Yield the tokens that are text."""
        return (text for text in map(utf8_text, self.strings) if text)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        return self._encoder.encode_batch(texts)

    def encode_arrays(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the token ids of all texts in succession, and the number of each text's."""
        if not texts:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        return self._encoder.encode_arrays(texts)
