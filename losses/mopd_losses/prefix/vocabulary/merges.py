"""``Merges``: which tokens a tokenizer of merges (BPE) writes after each other.

A token and the one after it are written so if no merge across their border comes before those that
complete them. The last part of a token waits until the merge that consumes it, and so does the
first part of the token after it: the merge of both, if there is one, happens if neither has been
consumed by then. So the tokens that may follow, or that divide a token, are found along the last
parts of the one and the first parts of the other, without a call of the tokenizer. Pre-tokenizers
and normalizers are not considered: what is found is to be tokenized.
"""

import heapq
import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from mopd_losses.prefix.vocabulary.hashed_strings import Integers
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary

#: Tokens that are looked at for one search.
_VISITED = 256

#: Searches kept in memory; beyond, all are discarded and computed again.
_CACHED = 200_000

#: Merges that are listed at once.
_CHUNK = 8


class Merges:
    """The merges of one tokenizer; none of a tokenizer of another kind.

    Args:
        merges: [merges, 3], ids of the left part, the right part and the whole, first merge first.
    """

    def __init__(self, vocabulary: SortedVocabulary, merges: Integers) -> None:
        self._vocabulary = vocabulary
        order = np.argsort(merges[:, 0], kind="stable")
        self._rights, self._merged_ids = merges[order, 1], merges[order, 2]
        self._ranks = order
        bounds = np.arange(len(vocabulary.strings) + 1)
        self._first = np.searchsorted(merges[order, 0], bounds)  # [vocabulary + 1]
        by_whole = np.argsort(merges[:, 2], kind="stable")
        self._parts = merges[by_whole, :2]
        self._first_parts = np.searchsorted(merges[by_whole, 2], bounds)  # [vocabulary + 1]
        self._after: dict[int, dict[int, int]] = {}
        self._last: dict[int, tuple[int, int, int] | None] = {}
        self._searches: dict[tuple[int, str, int], list[str]] = {}
        self._dividing: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def following(self, token: int, prefix: str, count: int) -> list[str]:
        """Return tokens that begin with a string, are longer, and may be written after a token:
        about those that are merged first."""
        key = token, prefix, count
        tokens = self._searches.get(key)
        if tokens is None:
            if len(self._searches) >= _CACHED:
                self._searches.clear()
            longer = self._vocabulary.range_of(prefix)
            is_begun = longer.longer < longer.stop
            tokens = self._searches[key] = self._searched(*key) if is_begun else []
        return tokens

    def _searched(self, token: int, prefix: str, count: int) -> list[str]:
        spine = [*self._last_parts(token)]
        strings = self._vocabulary.strings
        results: list[str] = []
        waiting: list[tuple[int, int, int, Iterator[tuple[int, int]], float]] = []

        def wait(left: int, merges: Iterator[tuple[int, int]], most: float) -> None:
            """Add the next token with a complete left part, if it is merged early enough."""
            rank, whole = next(merges, (math.inf, -1))
            if rank < most:
                heapq.heappush(waiting, (int(rank), whole, left, merges, most))

        for leaf in self._leaves(prefix):
            wait(leaf, self._begun_with(leaf, prefix), self._crossed(spine, leaf, -1))
        for _ in range(_VISITED):
            if not waiting or len(results) == count:
                break
            rank, whole, left, merges, most = heapq.heappop(waiting)
            wait(left, merges, most)
            completed = self._merge_of(whole)
            if completed is None or completed[0] != left:
                continue
            most = self._crossed(spine, whole, rank)
            if most == math.inf and len(strings[whole]) > len(prefix):
                results.append(strings[whole])
            wait(whole, self._begun_with(whole, prefix), most)
        return results

    def dividing(self, token: int) -> list[str]:
        """Return texts after which a token is not written, for each of its beginnings that may be
        written in its place."""
        texts = self._dividing.get(token)
        if texts is None:
            texts = self._dividing[token] = [*self._texts_dividing(token)]
        return texts

    def _texts_dividing(self, token: int) -> Iterator[str]:
        whole = self._vocabulary.strings[token]
        parts: dict[int, int] = {}
        end, merge = 0, self._merge_of(token)
        while merge is not None:
            left, right, _ = merge
            end += len(self._vocabulary.strings[left])
            parts[end] = left
            merge = self._merge_of(right)
        for end in range(1, len(whole)):
            for left in dict.fromkeys((self.token_of(whole[:end]), parts.get(end))):
                if left is not None:
                    for after in self.following(left, whole[end:], 1):
                        yield after[len(whole) - end :]

    def token_of(self, string: str) -> int | None:
        """Return the token that merges spell a string with; another one, such as a byte's, if none
        does, and None if no token spells it."""
        tokens = self._vocabulary.range_of(string)
        ids: list[int] = self._vocabulary.ids[tokens.start : tokens.longer].tolist()
        merged = (each for each in ids if self._is_merged(each))
        return next(merged, ids[0] if ids else None)

    def _begun_with(self, left: int, prefix: str) -> Iterator[tuple[int, int]]:
        """Yield the ranks and results of merges with a left part, lowest rank first: of results
        that begin with a string, or with which it begins."""
        own = slice(self._first[left], self._first[left + 1])
        ranks, merged_ids = self._ranks[own], self._merged_ids[own]
        length = len(self._vocabulary.strings[left])
        if length < len(prefix) and len(ranks):
            tokens, order = self._vocabulary.range_of(prefix), self._vocabulary.ranks[merged_ids]
            kept = (order >= tokens.start) & (order < tokens.stop)
            for end in range(length + 1, len(prefix)):
                shorter = self._vocabulary.range_of(prefix[:end])
                kept |= (order >= shorter.start) & (order < shorter.longer)
            ranks, merged_ids = ranks[kept], merged_ids[kept]
        for first in range(0, len(ranks), _CHUNK):
            chunk = slice(first, first + _CHUNK)
            yield from zip(ranks[chunk].tolist(), merged_ids[chunk].tolist(), strict=True)

    def _is_merged(self, token: int) -> bool:
        is_part = self._first[token] < self._first[token + 1]
        return bool(is_part or self._first_parts[token] < self._first_parts[token + 1])

    def _leaves(self, prefix: str) -> Iterator[int]:
        """Yield tokens with which a string begins and that no merge completes."""
        for length in range(1, min(len(prefix), 4) + 1):
            tokens = self._vocabulary.range_of(prefix[:length])
            for rank in range(tokens.start, tokens.longer):
                token = int(self._vocabulary.ids[rank])
                if self._merge_of(token) is None:
                    yield token

    def _last_parts(self, token: int) -> Iterator[tuple[int, float]]:
        """Yield a token, its last part, the last part of this, and so on, with the ranks of the
        merges that consume them; infinity for the token."""
        consumed = math.inf
        while True:
            yield token, consumed
            merge = self._merge_of(token)
            if merge is None:
                return
            _, token, consumed = merge

    def _crossed(self, spine: list[tuple[int, float]], left: int, rank: int) -> float:
        """Return when a first part that is complete since a merge is merged with one of the last
        parts; infinity for never."""
        times = [
            max(crossing, rank)
            for part, consumed in spine
            if (crossing := self._merges_after(part).get(left)) is not None
            and max(crossing, rank) < consumed
        ]
        return min(times, default=math.inf)

    def _merges_after(self, left: int) -> dict[int, int]:
        """Return the right parts of the merges with a left one, and the ranks, lowest first."""
        merges = self._after.get(left)
        if merges is None:
            own = slice(self._first[left], self._first[left + 1])
            columns = self._rights[own].tolist(), self._ranks[own].tolist()
            merges = self._after[left] = dict(zip(*columns, strict=True))
        return merges

    def _merge_of(self, token: int) -> tuple[int, int, int] | None:
        """Return the parts of the merge that completes a token in a separate text, and its rank;
        None for a token without one."""
        if token not in self._last:
            self._last[token] = self._merged_last(token)
        return self._last[token]

    def _merged_last(self, token: int) -> tuple[int, int, int] | None:
        first, last = self._first_parts[token : token + 2].tolist()
        if first == last:
            return None
        if last == first + 1:
            left, right = self._parts[first].tolist()
            return left, right, self._merges_after(left)[right]
        pieces = self._units(token)
        while True:
            ranked = [
                (rank, at)
                for at, (left, right) in enumerate(pairwise(pieces))
                if (rank := self._merges_after(left).get(right)) is not None
            ]
            if not ranked:
                return None
            rank, at = min(ranked)
            if len(pieces) == 2:
                return pieces[0], pieces[1], rank
            whole = self._whole(pieces[at], pieces[at + 1])
            pieces[at : at + 2] = [whole]

    def _units(self, token: int) -> list[int]:
        """Return the tokens that no merge completes and that spell a token."""
        first, last = self._first_parts[token : token + 2].tolist()
        if first == last:
            return [token]
        left, right = self._parts[first].tolist()
        return self._units(left) + self._units(right)

    def _whole(self, left: int, right: int) -> int:
        own = slice(self._first[left], self._first[left + 1])
        return int(self._merged_ids[own][self._rights[own] == right][0])
