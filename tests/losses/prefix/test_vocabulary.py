"""Hashed strings and tables of prefix KL, against strings and dictionaries."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_losses.prefix.boundaries import TokenizedText
from mopd_losses.prefix.strings import Strings
from mopd_losses.prefix.vocabulary.hashed_strings import (
    codes_of,
    joined,
    prefix_hashes,
    slice_hashes,
    string_hashes,
)
from mopd_losses.prefix.vocabulary.key_table import MISSING, KeyTable
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary, control_characters
from tests.losses.families import family
from tests.real_vocabularies import NAMES, real


@cache
def vocabulary_of(name: str) -> SortedVocabulary:
    table = real(name).table
    return SortedVocabulary(table, control_characters(table))


keys = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 40), unique=True, max_size=200)


@given(st.lists(keys, max_size=8), st.integers(1, 300))
def test_a_table_is_a_dictionary_that_is_cleared_when_full(
    batches: list[list[int]], most: int
) -> None:
    table, expected = KeyTable(most), dict[int, int]()
    for batch in batches:
        # The table's empty slots have key 0: it is stored as 1.
        new = [key for key in dict.fromkeys(max(k, 1) for k in batch) if key not in expected]
        if len(expected) + len(new) > most:
            expected.clear()
        expected.update((key, number) for number, key in enumerate(new))
        table.add(np.array(new, dtype=np.uint64), np.arange(len(new)))
        assert len(table) == len(expected)
        sought = [*expected, *(key ^ 1 << 63 for key in batch)]
        values = table.values_of(np.array(sought, dtype=np.uint64)).tolist()
        assert values == [expected.get(max(key, 1), MISSING) for key in sought]
        stored, numbers = table.items()
        assert dict(zip(stored.tolist(), numbers.tolist(), strict=True)) == expected


def test_the_nodes_of_a_vocabulary_are_the_beginnings_of_its_tokens() -> None:
    table = family("digit").table
    vocabulary = SortedVocabulary(table, control_characters(table))
    strings = [string for string in vocabulary.strings if string]
    ends = {string[:end] for string in strings for end in range(1, len(string) + 1)}
    text = "".join(sorted(ends))
    lengths = np.array([len(end) for end in sorted(ends)])
    stops = np.cumsum(lengths)
    hashes = prefix_hashes(codes_of(text))
    nodes = vocabulary.nodes_of(slice_hashes(hashes, stops - lengths, stops))
    # Nodes are numbered in the order of strings, which every join and every slice preserves.
    assert nodes.tolist() == list(range(len(ends)))
    middle = stops - lengths + lengths // 2
    both = joined(
        slice_hashes(hashes, stops - lengths, middle),
        lengths // 2,
        slice_hashes(hashes, middle, stops),
    )
    assert vocabulary.nodes_of(both).tolist() == nodes.tolist()
    for node, end in enumerate(sorted(ends)):
        expected = vocabulary.range_of(end)
        bounds = (vocabulary.node_starts, vocabulary.node_longer, vocabulary.node_stops)
        assert tuple(column[node] for column in bounds) == expected
        assert expected.stop - expected.start == sum(s.startswith(end) for s in strings)
    unknown = prefix_hashes(codes_of("\u2588"))[1:]
    assert vocabulary.nodes_of(unknown).tolist() == [-1]


def test_a_string_may_continue_what_was_begun_with_its_beginning() -> None:
    table = family("digit").table
    vocabulary = SortedVocabulary(table, control_characters(table))
    tokens = [token for token, string in enumerate(vocabulary.strings) if string]
    known = {vocabulary.strings[token] for token in tokens}
    nodes = {string[:end] for string in known for end in range(1, len(string) + 1)}
    ends = [(t, s) for t in tokens for s in range(len(vocabulary.strings[t]))]
    ids, starts = np.array(ends).T
    texts = [vocabulary.strings[token][start:] for token, start in ends]
    empty = TokenizedText.of(vocabulary, [], {})
    strings = Strings.of_tokens(vocabulary, empty, ids, starts)
    only_longer = 0
    for begun in ("", "t", "th", " ", "\n", "1", "bro"):
        by_token = np.array(
            [any(begun + text[:n] in known for n in range(1, len(text) + 1)) for text in texts]
        )
        covered = np.array([begun + text in nodes for text in texts])
        only_longer += int((covered & ~by_token).sum())
        before, lengths = string_hashes([begun] * len(ends)), np.full(len(ends), len(begun))
        continues = strings.may_continue(vocabulary, before, lengths)
        assert continues.tolist() == (by_token | covered).tolist()
    assert only_longer


@pytest.mark.parametrize("name", NAMES)
@given(text=st.lists(st.sampled_from(["a", "be", "1", "12", " ", "  ", "\n", ".", "é", "("])))
def test_a_text_has_the_same_tokens_if_it_is_divided_behind_a_word(
    name: str, text: list[str]
) -> None:
    sides = real(name)
    vocabulary = vocabulary_of(name)
    whole = "".join(text)
    sequence = sides.table.sequence(sides.encoder.encode(whole))
    symbols = TokenizedText.of(vocabulary, [sequence], {})
    offsets = np.arange(len(whole.encode()) + 1)
    chosen = np.flatnonzero(symbols.follow_word(offsets)).tolist()
    for offset in chosen:
        parts = whole.encode()[:offset].decode(), whole.encode()[offset:].decode()
        both = [token for part in parts for token in sides.encoder.encode(part)]
        assert both == sequence.token_ids.tolist()
    if name != "v3":
        words = [end for end in range(1, len(whole)) if whole.isascii()]
        assert all(end in chosen for end in words if whole[end - 1 : end + 1] in ("a ", "e "))
