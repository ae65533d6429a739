"""Hashed strings and tables of prefix KL, against strings and dictionaries."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mopd_losses.prefix.vocabulary.hashed_strings import (
    codes_of,
    joined,
    prefix_hashes,
    slice_hashes,
)
from mopd_losses.prefix.vocabulary.key_table import MISSING, KeyTable
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary, control_characters
from tests.losses.families import family

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
