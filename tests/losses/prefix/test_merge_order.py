"""Tokens after each other, by the order of merges: against trials of all tokens."""

import random
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bench.byte_models import merging_tokenizer
from mopd_losses.alignment.byte_strings import control_characters
from mopd_losses.prefix.vocabulary.merges import Merges
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary
from tests.losses.prefix_pairs import Tongue
from tests.real_vocabularies import real
from tests.reference import merges as slow


@st.composite
def tongues(draw: st.DrawFn) -> Tongue:
    """Tokenizers of bytes that merge a few letters, in any order."""
    letters = draw(st.sampled_from(["ab", "abc"]))
    known = [*letters]
    for _ in range(draw(st.integers(1, 12))):
        pair = draw(st.tuples(st.sampled_from(known), st.sampled_from(known)))
        if "".join(pair) not in known and len("".join(pair)) <= 6:
            known.append("".join(pair))
    return merging_tokenizer(known[len(letters) :], "<over>")


def sides(tongue: Tongue) -> tuple[Merges, list[str], slow.Merges]:
    vocabulary = SortedVocabulary(tongue.table, control_characters(tongue.table))
    strings = [each.decode("latin-1") for each in tongue.table.all_bytes]
    parts = [(strings[a], strings[b]) for a, b, _ in tongue.encoder.merges.tolist()]
    return Merges(vocabulary, tongue.encoder.merges), strings, parts


@given(tongues(), st.data())
def test_tokens_and_those_behind_them_stay_as_they_are(tongue: Tongue, data: st.DataObject) -> None:
    merges, strings, parts = sides(tongue)
    tokens = sorted(string for string in strings if string and set(string) <= set("abc"))
    # A trained tokenizer has no tokens that its merges do not produce.
    assume(all(slow.merged(parts, string) == [string] for string in tokens))
    token, prefix = data.draw(st.sampled_from(tokens)), data.draw(st.sampled_from(tokens))
    count = data.draw(st.integers(1, 4))
    token_id = merges.token_of(token)
    assert token_id is not None
    assert merges.following(token_id, prefix, count) == slow.following(parts, token, prefix, count)
    assert merges.dividing(token_id) == slow.dividing(parts, token)


@cache
def real_merges(name: str) -> Merges:
    side = real(name)
    vocabulary = SortedVocabulary(side.table, control_characters(side.table))
    return Merges(vocabulary, side.encoder.merges)


@pytest.mark.parametrize("name", ["tekken", "v3", "python_50k"])
def test_published_tokenizers_write_what_follows(name: str) -> None:
    side, merges, chance = real(name), real_merges(name), random.Random(0)
    spelled = enumerate(side.table.all_bytes)
    texts = [(token, each.decode()) for token, each in spelled if each.isalpha()]
    words = [(token, text) for token, text in texts if merges.token_of(text) == token]
    nothing = 0
    for _ in range(300):
        (token, text), (_, other) = chance.choice(words), chance.choice(words)
        written = side.encoder.encode(text + other)
        for behind in merges.following(token, other[:2], 8):
            assert side.encoder.encode(text + behind)[0] == token
        is_written = len(written) == 2 and written[0] == token and len(other) > 2
        nothing += is_written and not merges.following(token, other[:2], 8)
    assert nothing == 0
