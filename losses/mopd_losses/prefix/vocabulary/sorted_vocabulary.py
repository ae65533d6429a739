"""``SortedVocabulary``: the tokens of one side in the order of their bytes.

All tokens that begin with a string are one contiguous range of ranks, so the mass of "the text
continues with this string" in one row is a sum over a range. Strings are bytes as Latin-1
characters; a control token is one private character above them, the same on both sides for one
role or name.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_strings import is_continuation, utf8_text
from mopd_losses.prefix.vocabulary.hashed_strings import (
    Codes,
    Hashes,
    Integers,
    codes_of,
    inverse_powers,
    prefix_hashes,
    slice_hashes,
)
from mopd_losses.prefix.vocabulary.key_table import KeyTable
from mopd_protocol.tokenizers.token_table import TokenTable

#: Sorts after every character of a string.
_HIGHEST_CHARACTER = "\U0010ffff"

#: The last character that is a byte.
_HIGHEST_BYTE = 0xFF

#: Ranges kept in memory; beyond, all are discarded and computed again.
_CACHED_RANGES = 500_000


class PrefixRange(NamedTuple):
    """Ranks ``[start, stop)`` of the tokens that begin with a string; from ``longer`` on they have
    more characters than the string."""

    start: int
    longer: int
    stop: int


def _pair_numbers(first: Codes, second: Codes) -> Codes:
    """Number pairs of bytes."""
    return (first << np.uint16(8)) | second


def are_continuations(codes: Codes) -> NDArray[np.bool_]:
    """Return whether each is a byte that continues a character of UTF-8."""
    return (codes >= 0x80) & (codes < 0xC0)


def last_character(text: str) -> int:
    """Return where the last character of UTF-8 begins in bytes; 0 if there is none."""
    start = len(text) - 1
    while start > 0 and is_continuation(ord(text[start])):
        start -= 1
    return max(start, 0)


def _characters_from(begun: str) -> Iterator[str]:
    """Yield the bytes of all characters of UTF-8 that begin with some bytes, in order."""
    firsts = (0xC2, 0xE0, 0xF0, 0xF5)  # bytes that begin characters of two, three and four bytes
    length = bisect_right(firsts, ord(begun[0])) + 1
    missing = length - len(begun) if length <= len(firsts) else 0
    for ends in product(map(chr, range(0x80, 0xC0)), repeat=max(missing, 0)):
        character = begun + "".join(ends)
        if utf8_text(character) is not None:
            yield character


class SortedVocabulary:
    """Tokens sorted by their strings.

    A *node* is a string with which some token begins; nodes are numbered in the order of strings.

    Args:
        controls: name of a control token -> its private character.
    """

    def __init__(self, table: TokenTable, controls: Mapping[str, str]) -> None:
        self.table = table
        self.strings = [spelled.decode("latin-1") for spelled in table.all_bytes]  # by id
        for token_id, name in table.marks.items():
            self.strings[token_id] = controls[name]
        tokens = [token_id for token_id, string in enumerate(self.strings) if string]
        tokens.sort(key=self.strings.__getitem__)
        self._keys = [self.strings[token_id] for token_id in tokens]
        self.ids: Integers = np.array(tokens, dtype=np.int64)  # [tokens], by rank
        self.ranks: Integers = np.full(len(self.strings), -1, dtype=np.int64)
        """[vocabulary], rank of each id; -1 for ids without a string."""
        self.ranks[self.ids] = np.arange(len(tokens))
        self.lengths: Integers = np.array([len(string) for string in self.strings], dtype=np.int64)
        """[vocabulary], characters of each id."""
        self.is_control: NDArray[np.bool_] = np.zeros(len(self.strings), dtype=np.bool_)
        """[vocabulary]"""
        self.is_control[list(table.marks)] = True
        self._index()
        self._ranges: dict[str, PrefixRange] = {}
        self._frequent: dict[tuple[str, int], list[str]] = {}
        self._continuations: dict[tuple[str, int], list[str]] = {}
        self._unspelled_characters: dict[str, list[str]] = {}

    def _index(self) -> None:
        """Number the nodes and find the ranks of each: [nodes + 1], the last one has none."""
        lengths = self.lengths[self.ids]
        codes = codes_of("".join(self._keys))
        first = np.cumsum(lengths) - lengths
        flat = np.repeat(first, lengths)
        ends = np.arange(len(codes)) + 1
        beginnings = slice_hashes(prefix_hashes(codes), flat, ends)  # of each token, in order
        ranks = np.repeat(np.arange(len(lengths)), lengths)
        characters = ends - flat
        # A beginning that the token before has, too, is the same node.
        before = np.where(ranks > 0, first[ranks - 1] + characters - 1, 0)
        shared = (ranks > 0) & (characters <= lengths[ranks - 1])
        is_new = ~(shared & (beginnings[before] == beginnings))
        self.node_starts = np.append(ranks[is_new], 0)
        hashes = beginnings[is_new]
        self._nodes = KeyTable(len(hashes))
        self._nodes.add(hashes, np.arange(len(hashes)))
        members = self._nodes.values_of(beginnings)
        counts = np.bincount(members, minlength=len(hashes))
        tokens = members[first + lengths - 1]  # the node of each whole token
        spelled = np.bincount(tokens, minlength=1)
        spelled = np.pad(spelled, (0, len(hashes) + 1 - len(spelled)))
        self.node_stops = self.node_starts + np.append(counts, 0)
        self.node_longer = self.node_starts + spelled
        self._longer_tokens = np.zeros(len(self.strings), dtype=np.int64)  # [vocabulary]
        self._longer_tokens[self.ids] = (self.node_stops - self.node_longer)[tokens]
        self._pairs = np.zeros(1 << 16, dtype=np.bool_)  # of bytes
        is_inside = ends[:-1] != (first + lengths)[ranks[:-1]]
        self._pairs[_pair_numbers(codes[:-1], codes[1:])[is_inside]] = True
        self._codes = codes
        self._first_codes = np.zeros(len(self.strings), dtype=np.int64)  # [vocabulary]
        self._first_codes[self.ids] = first
        # [vocabulary], where the beginnings of each id are, after an empty one.
        self._beginnings: Hashes = np.insert(beginnings, first, np.uint64(0))
        self._first = np.zeros(len(self.strings), dtype=np.int64)
        self._first[self.ids] = first + np.arange(len(first))

    def nodes_of(self, hashes: Hashes) -> Integers:
        """Return the nodes of strings; -1 for strings with which no token begins."""
        return self._nodes.values_of(hashes)

    def are_tokens(self, nodes: Integers) -> NDArray[np.bool_]:
        """Return whether each node is a token, not only the beginning of longer ones."""
        return self.node_starts[nodes] < self.node_longer[nodes]  # the last one, -1, is none

    def contain(self, first: Codes, second: Codes) -> NDArray[np.bool_]:
        """Return whether some token contains both characters in succession."""
        are_bytes = (first | second) <= _HIGHEST_BYTE
        return self._pairs.take(_pair_numbers(first, second)) & are_bytes

    def codes_at(self, tokens: Integers, starts: Integers) -> Codes:
        """Return the character at an offset of each token that has a string."""
        return self._codes.take(self._first_codes.take(tokens) + starts)

    def slices(self, tokens: Integers, starts: Integers, stops: Integers) -> Hashes:
        """Hash slices of tokens that have strings."""
        first, beginnings = self._first.take(tokens), self._beginnings
        return (beginnings.take(first + stops) - beginnings.take(first + starts)) * inverse_powers(
            starts
        )

    def __len__(self) -> int:
        return len(self._keys)

    def string_at(self, rank: int) -> str:
        """Return the string of the token with this rank."""
        return self._keys[rank]

    def covers(self, prefix: str) -> bool:
        """Return whether any token begins with ``prefix``."""
        tokens = self.range_of(prefix)
        return tokens.start < tokens.stop

    def is_token(self, string: str) -> bool:
        """Return whether a string is a token."""
        tokens = self.range_of(string)
        return tokens.start < tokens.longer

    def frequent_tokens(self, prefix: str, count: int) -> list[str]:
        """Return at most ``count`` tokens that are longer than ``prefix`` and begin with it: those
        with the lowest ids, which tokenizers are trained to merge first."""
        cached = self._frequent.get((prefix, count))
        if cached is None:
            if len(self._frequent) >= _CACHED_RANGES:
                self._frequent.clear()
            ids = self._frequent_ids(prefix, count)
            cached = self._frequent[prefix, count] = [self.strings[token] for token in ids.tolist()]
        return cached

    def completed(self, text: str, count: int) -> list[str]:
        """Return a text of which the last character is incomplete with at most ``count`` frequent
        tokens that complete it, and may continue it, and with a character that no token contains
        from its first byte on: a tokenizer spells it with tokens of bytes."""
        start = last_character(text)
        endings = self.frequent_tokens(text[start:], count)
        unspelled = self._unspelled(text[start:])
        return [text[:start] + each for each in (*endings, *unspelled)]

    def _unspelled(self, begun: str) -> list[str]:
        """Return the first character that begins with some bytes and begins no token, if any."""
        if begun not in self._unspelled_characters:
            characters = (each for each in _characters_from(begun) if not self.covers(each))
            self._unspelled_characters[begun] = [*islice(characters, 1)]
        return self._unspelled_characters[begun]

    def continuations(self, end: str, count: int) -> list[str]:
        """Return what is after ``end``, or a shorter end of it that begins a character, in the
        ``frequent_tokens`` that begin with it."""
        cached = self._continuations.get((end, count))
        if cached is None:
            if len(self._continuations) >= _CACHED_RANGES:
                self._continuations.clear()
            cached = self._continuations[end, count] = [
                token[len(end) - start :]
                for start in range(len(end))
                if not is_continuation(ord(end[start]))
                for token in self.frequent_tokens(end[start:], count)
            ]
        return cached

    def specific_tokens(self, prefix: str, count: int, most: int) -> list[str]:
        """Return those of ``frequent_tokens`` with which at most ``most`` longer tokens begin."""
        ids = self._frequent_ids(prefix, count)
        return [self.strings[token] for token in ids[self._longer_tokens[ids] <= most].tolist()]

    def _frequent_ids(self, prefix: str, count: int) -> Integers:
        tokens = self.range_of(prefix)
        ids = self.ids[tokens.longer : tokens.stop]
        return np.sort(ids if len(ids) <= count else np.partition(ids, count)[:count])

    def range_of(self, prefix: str) -> PrefixRange:
        """Return the ranks of all tokens that begin with ``prefix``."""
        cached = self._ranges.get(prefix)
        if cached is None:
            if len(self._ranges) >= _CACHED_RANGES:
                self._ranges.clear()
            start = bisect_left(self._keys, prefix)
            stop = bisect_left(self._keys, prefix + _HIGHEST_CHARACTER, lo=start)
            longer = start
            while longer < stop and self._keys[longer] == prefix:
                longer += 1
            cached = self._ranges[prefix] = PrefixRange(start, longer, stop)
        return cached
