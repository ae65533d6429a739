"""The oracle of next bytes, against enumerations of texts and of token sequences."""

import math
from collections.abc import Mapping
from functools import cache
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.byte_models import merging_pair
from bench.tasks.task_tokenizers import byte_pair_tokenizer, hindi_tokenizer, unigram_tokenizer
from tests.losses import families
from tests.losses.byte_sides import byte_model, exact_side
from tests.losses.prefix_pairs import Pair, Tongue, gapped_pair, random_pair
from tests.reference.byte_model import END, SYMBOLS, ByteModel, completions, divergence
from tests.reference.text_model import markov_texts

#: Texts that two tokenizers divide otherwise, inside characters and runs of white space too.
SCRIPTS = {
    "x:\n\n\ny  z": 0.05,
    "x:\n\n\n": 0.05,
    "सत्रह जनवरी २०२४": 0.3,
    "सत्रह जून १९९८": 0.2,
    "सात मई २०२४": 0.3,
    "January 17, 2024": 0.1,
}


def next_in(texts: Mapping[str, float], begun: bytes) -> NDArray[np.float64]:
    """[SYMBOLS], the probabilities of what follows some bytes, by enumeration."""
    masses = np.zeros(SYMBOLS)
    for text, mass in texts.items():
        data = text.encode()
        if data.startswith(begun):
            masses[data[len(begun)] if len(data) > len(begun) else END] += mass
    return masses / masses.sum()


@cache
def task_pair(first: str, second: str) -> Pair:
    """Two tokenizers by name, with different ends."""
    makers = {
        "byte pairs": byte_pair_tokenizer,
        "hindi": hindi_tokenizer,
        "unigram": unigram_tokenizer,
    }

    def tongue(name: str, end: str) -> Tongue:
        if name in makers:
            return Tongue.ended(makers[name]().backend_tokenizer, end)
        shared = families.family(name).tokenizer
        return Tongue.ended(Tokenizer.from_str(shared.to_str()), end)

    return Pair(tongue(first, "<over>"), tongue(second, "<stop>"))


@given(seed=st.integers(0, 400), letters=st.sampled_from(["ab", "abc"]), merges=st.integers(2, 10))
@settings(deadline=None, max_examples=15)
def test_next_bytes_of_tokenizers_that_merge_are_those_of_the_texts(
    seed: int, letters: str, merges: int
) -> None:
    texts = markov_texts(letters, 4, seed)
    assert_exact(merging_pair(seed, letters, merges).student, texts)


@given(seed=st.integers(0, 15), has_gaps=st.booleans())
@settings(deadline=None, max_examples=15)
def test_next_bytes_of_tokenizers_of_the_longest_match_are_those_of_the_texts(
    seed: int, has_gaps: bool
) -> None:
    pair = (gapped_pair if has_gaps else random_pair)(seed)
    assert_exact(pair.student, markov_texts("ab", 4, seed))


@pytest.mark.parametrize("name", ["byte pairs", "hindi", "unigram", "digit", "whole_number"])
def test_next_bytes_of_tokenizers_that_divide_characters_are_those_of_the_texts(name: str) -> None:
    assert_exact(task_pair(name, "hindi").student, SCRIPTS)


def assert_exact(side: Tongue, texts: Mapping[str, float]) -> None:
    model = exact_side(side, texts, least_share=0.0)
    for text in Random(0).sample(sorted(texts), min(6, len(texts))):
        data = text.encode()
        result = model.next_bytes(data)
        expected = [next_in(texts, data[:length]) for length in range(len(data) + 1)]
        np.testing.assert_allclose(np.exp(result.logprobs), expected, atol=1e-12, err_msg=text)
        assert np.exp(result.of_text(data).sum()) == pytest.approx(texts[text])
        begun = math.fsum(m for t, m in texts.items() if t.encode().startswith(data[:3]))
        assert np.exp(result.logmasses[min(3, len(data))]) == pytest.approx(begun)
        assert not result.omitted.any()


@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.5, 2.0]))
@settings(deadline=None, max_examples=25)
def test_next_bytes_of_any_rows_are_those_of_all_covers(seed: int, scale: float) -> None:
    # Also of rows with mass on tokens that the tokenizer would not write.
    draw = Random(seed)
    side = merging_pair(seed % 40, "ab", 6).student
    rows = _Rows(side, "ab", seed, scale)
    model = byte_model(side, rows, least_share=0.0)
    data = "".join(draw.choices("ab", k=draw.randint(0, 4))).encode()
    result = np.exp(model.next_bytes(data).logprobs)
    for length in range(len(data) + 1):
        masses = np.zeros(SYMBOLS)
        for byte in b"ab":
            masses[byte] = covers(model, data[:length] + bytes([byte]))
        context = tuple(side.encode_bytes(data[:length]))
        masses[END] = probability(model, context) * math.exp(rows(context)[side.end])
        np.testing.assert_allclose(result[length], masses / masses.sum(), atol=1e-12)


def covers(model: ByteModel, text: bytes, ids: tuple[int, ...] = ()) -> float:
    """The mass of the shortest sequences of tokens that begin with a text, of which all but the
    last one are the tokenizer's."""
    begun = b"".join(model.token_bytes[token] for token in ids)
    if ids not in map(tuple, model.encode(begun, begun)):
        return 0.0
    total = 0.0
    for token, spelled in enumerate(model.token_bytes):
        whole = begun + spelled
        if spelled and whole.startswith(text):
            total += probability(model, (*ids, token))
        elif spelled and text.startswith(whole):
            total += covers(model, text, (*ids, token))
    return total


def probability(model: ByteModel, ids: tuple[int, ...]) -> float:
    return math.exp(math.fsum(model.row(ids[:at])[token] for at, token in enumerate(ids)))


class _Rows:
    """Random rows over the tokens of a few letters and the end."""

    def __init__(self, side: Tongue, letters: str, seed: int, scale: float) -> None:
        spelled = enumerate(side.table.all_bytes)
        self.ids = [i for i, b in spelled if b and set(b) <= set(letters.encode())] + [side.end]
        self._width, self._seed, self._scale = side.table.size, seed, scale
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, ids: tuple[int, ...]) -> NDArray[np.float64]:
        self.calls.append(ids)
        random = np.random.default_rng([self._seed, *ids])
        weights = np.exp(self._scale * random.normal(size=len(self.ids)))
        row = np.full(self._width, -np.inf)
        row[self.ids] = np.log(weights / weights.sum())
        return row


@pytest.mark.parametrize(("first", "second"), [("byte pairs", "unigram"), ("hindi", "byte pairs")])
def test_equal_models_differ_by_nothing_through_any_tokenizers(first: str, second: str) -> None:
    pair = task_pair(first, second)
    sides = [exact_side(side, SCRIPTS) for side in (pair.student, pair.teacher)]
    for text in SCRIPTS:
        own, other = (side.next_bytes(text.encode()) for side in sides)
        assert abs(divergence(own, other)).max() < 1e-9


@given(seed=st.integers(0, 400))
@settings(deadline=None, max_examples=8)
def test_divergence_over_bytes_is_that_of_the_models_over_texts(seed: int) -> None:
    pair = merging_pair(seed, "ab", 6)
    first, second = (markov_texts("ab", 4, seed + number) for number in range(2))
    sides = exact_side(pair.student, first), exact_side(pair.teacher, second, least_share=0.0)
    total = math.fsum(
        mass * divergence(*(side.next_bytes(text.encode()) for side in sides)).sum()
        for text, mass in first.items()
    )
    exact = math.fsum(mass * math.log(mass / second[text]) for text, mass in first.items())
    # Up to contexts of the first model below its least share.
    assert total == pytest.approx(exact, abs=2e-2)


@given(seed=st.integers(0, 400), share=st.sampled_from([0.02, 0.2]))
@settings(deadline=None, max_examples=15)
def test_the_error_by_omitted_contexts_is_within_the_bound(seed: int, share: float) -> None:
    texts = markov_texts("ab", 5, seed)
    side = merging_pair(seed % 40, "ab", 8).student
    for text in Random(seed).sample(sorted(texts), 3):
        exact, rough = (
            exact_side(side, texts, least_share=least).next_bytes(text.encode())
            for least in (0.0, share)
        )
        assert rough.rows <= exact.rows
        differences = np.abs(np.exp(exact.logprobs) - np.exp(rough.logprobs)).sum(axis=1)
        assert (differences <= 2 * rough.omitted + 1e-12).all()


def test_rows_are_requested_once_and_only_where_their_share_counts() -> None:
    side = Tongue.of("bb", "bbb", by_merges=True)
    rows = _Rows(side, "ab", 1, 1.0)
    # After `b`, most of the mass is of longer tokens.
    rough, exact = (byte_model(side, rows, least_share=s).next_bytes(b"b") for s in (0.9, 0.0))
    assert (rough.rows, exact.rows) == (1, 2)
    assert rough.omitted[1] > exact.omitted[1] == 0
    rows.calls.clear()
    assert byte_model(side, rows).next_bytes(b"abbba").rows == len(rows.calls)
    assert len(rows.calls) == len(set(rows.calls))
    with pytest.raises(ValueError, match="does not continue"):
        byte_model(side, rows, least_share=0.0).next_bytes(b"ac")


@pytest.mark.parametrize("text", ["é", "語", "🙂"])
def test_completions_are_characters_that_begin_with_the_bytes(text: str) -> None:
    data = text.encode()
    for length in range(1, len(data)):
        results = list(completions(data[:length], data))
        assert results[0] == data
        assert all(each.startswith(data[:length]) and len(each.decode()) == 1 for each in results)
        assert len(results) > 60
