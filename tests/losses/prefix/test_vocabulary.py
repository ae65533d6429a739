"""Hashed strings and tables of prefix KL, against strings and dictionaries."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_losses.alignment.byte_strings import control_characters
from mopd_losses.prefix.text.boundaries import TokenizedText
from mopd_losses.prefix.text.strings import Strings
from mopd_losses.prefix.vocabulary.first_ends import NOT_TEXT, FirstEnds
from mopd_losses.prefix.vocabulary.hashed_strings import (
    codes_of,
    joined,
    prefix_hashes,
    slice_hashes,
    string_hashes,
)
from mopd_losses.prefix.vocabulary.key_table import MISSING, KeyTable
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary
from mopd_losses.prefix.vocabulary.spellings import Spellings
from mopd_protocol.tokenizers.joined_texts import TextTokens
from mopd_protocol.tokenizers.token_table import TextEncoder
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
        searched = [*expected, *(key ^ 1 << 63 for key in batch)]
        values = table.values_of(np.array(searched, dtype=np.uint64)).tolist()
        assert values == [expected.get(max(key, 1), MISSING) for key in searched]
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
@given(
    text=st.lists(st.sampled_from([*"ab1\n.é()@_'- ", "be", "12", "  ", "\r\n", "'ll", "Bc", "\t"]))
)
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
        expected = ("a ", "e ", "1@", "b(", ") ")
        assert all(end in chosen for end in words if whole[end - 1 : end + 1] in expected)


class Lowering:
    """An encoder whose normaliser changes capital letters."""

    def __init__(self, inner: TextEncoder) -> None:
        self._inner = inner

    def encode_arrays(self, texts: list[str]) -> TextTokens:
        return self._inner.encode_arrays([text.lower() for text in texts])


def ends_of(strings: list[str], text: str, ids: list[int]) -> list[int]:
    """Ends of tokens, as far as they spell a text."""
    ends, end = list[int](), 0
    for token in ids:
        if not strings[token] or not text.startswith(strings[token], end):
            break
        end += len(strings[token])
        ends.append(end)
    return ends


pieces = st.text(st.sampled_from("abeinrst ABE19é\n.,-"), max_size=24)
long_pieces = st.tuples(pieces, st.integers(0, 90).map("-".__mul__), pieces).map("".join)


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(st.tuples(pieces | long_pieces, st.integers(0, 60)), max_size=12), st.booleans())
def test_tokens_of_strings_are_those_that_spell_each(
    name: str, drawn: list[tuple[str, int]], lowering: bool
) -> None:
    vocabulary, encoder = vocabulary_of(name), real(name).encoder
    used: Any = Lowering(encoder) if lowering else encoder
    texts = [text for text, _ in drawn] + ["é"]
    strings = [text.encode().decode("latin-1") for text in texts] + ["\xc3", "a\u0100"]
    ids = [encoder.encode(text.lower() if lowering else text) for text in texts]
    expected = [ends_of(vocabulary.strings, *each) for each in zip(strings, ids, strict=False)]

    spelled = Spellings.of(vocabulary, used, strings)
    assert spelled.is_text.tolist() == [True] * len(texts) + [False] * 2
    assert spelled.counts.tolist() == [*map(len, ids), 0, 0]
    for index, ends in enumerate([*expected, [], []]):
        tokens = spelled.owners == index
        assert spelled.ends[tokens].tolist() == ends
        assert spelled.steps[tokens].tolist() == list(range(len(ends)))
        assert spelled.ids[tokens].tolist() == [*ids, [], []][index][: len(ends)]
    assert spelled.first_ends().tolist() == [*(e[0] if e else 0 for e in expected), 0, 0]

    # Fewer than are recorded are after the beginning.
    begun = [max(len(s) - behind, 0) for (_, behind), s in zip(drawn, strings, strict=False)]
    begun += [0, 0, 0]
    first = FirstEnds(vocabulary, used)
    for _ in range(2):  # computed, and known
        results = first.of(begun, strings).tolist()
        beyond = [[e - b for e in ends if e > b] for ends, b in zip(expected, begun, strict=False)]
        assert results == [*(ends[0] if ends else 0 for ends in beyond), NOT_TEXT, NOT_TEXT]
