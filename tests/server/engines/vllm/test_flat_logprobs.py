"""Tests of vLLM's flat lists and arrays against the distributions of their origin."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_server.engines.vllm.flat_logprobs import (
    CompletionArrays,
    pad_rows,
    topk_from_lists,
    truncate,
)
from tests.reference.flat_logprobs_by_hand import Flat, flat_of, rows_by_hand

#: Few values, so that ties and impossible tokens are common.
LOGITS = st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 0.0, 2.0, 9.0])


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(math.exp(x) for x in logits))
    return [float(np.float32(x - total)) for x in logits]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[list[float]], list[int], int, int]:
    """Distributions, predicted tokens, number of completion tokens, and k."""
    vocabulary = draw(st.integers(2, 12))
    length = draw(st.integers(2, 9))
    distributions = [
        log_softmax([*draw(st.lists(LOGITS, min_size=vocabulary, max_size=vocabulary)), 0.0])
        for _ in range(length)
    ]
    tokens = draw(st.lists(st.integers(0, vocabulary), min_size=length, max_size=length))
    return (
        distributions,
        tokens,
        draw(st.integers(1, length - 1)),
        draw(st.integers(1, vocabulary + 1)),
    )


@given(sequences(), st.booleans())
def test_rows_equal_the_distributions_that_predict_the_completion(
    sequence: tuple[list[list[float]], list[int], int, int], once: bool
) -> None:
    distributions, tokens, rows, top_k = sequence
    flat = flat_of(distributions, tokens, top_k, once=once)
    completion = np.array(tokens[-rows:], dtype=np.int32)
    scores = topk_from_lists(flat, completion, top_k=top_k, real_ids=len(distributions[0]))
    assert scores.ids.shape == (rows, top_k)
    for row, expected in enumerate(rows_by_hand(distributions, tokens, rows, top_k)):
        kept = [int(i) for i in scores.ids[row] if i >= 0]
        assert dict(zip(kept, scores.logprobs[row].tolist(), strict=False)) == expected.entries
        assert scores.token_logprobs[row] == np.float32(expected.token_logprob)
        tail = math.exp(scores.tail_logprobs[row])
        assert tail == pytest.approx(expected.tail, abs=1e-6)
        if top_k == len(distributions[0]):
            assert tail == 0.0
        elif int(completion[row]) not in expected.entries:
            assert scores.tail_logprobs[row] >= scores.token_logprobs[row]


def test_tail_is_at_least_the_completion_token_outside_the_entries() -> None:
    # The log-softmax of the most likely id rounds to 0, so that one minus its probability is 0.
    ids, logprobs = np.array([[0]]), np.zeros((1, 1), dtype=np.float32)
    unlikely = np.array([-25.0], dtype=np.float32)
    scores = truncate(ids, logprobs, np.array([7]), unlikely, real_ids=100)
    assert scores.tail_logprobs[0] == -25.0


def test_mass_above_one_by_rounding_has_no_tail() -> None:
    logprobs = np.array([[np.log(0.5), np.log(0.5) + 1e-6]], dtype=np.float32)
    scores = truncate(np.array([[0, 1]]), logprobs, np.array([0]), logprobs[:, 0], real_ids=100)
    assert np.isneginf(scores.tail_logprobs[0])


@given(st.lists(st.lists(st.integers(0, 9), unique=True, max_size=4), min_size=1, max_size=5))
def test_candidates_are_sorted_and_missing_ones_remain_missing(rows: list[list[int]]) -> None:
    all_logprobs = np.log(np.arange(1, 11, dtype=np.float32) / 55)
    ids = pad_rows([np.array(row, dtype=np.int32) for row in rows])
    width = max(map(len, rows))
    logprobs = np.where(ids < 0, -np.inf, all_logprobs[ids]).astype(np.float32)
    tokens = np.full(len(rows), 9)
    scores = truncate(ids, logprobs, tokens, np.full(len(rows), all_logprobs[9]), real_ids=10)
    for row, candidates in enumerate(rows):
        expected = sorted(candidates, reverse=True)  # probability increases with the id
        assert scores.ids[row].tolist() == expected + [-1] * (width - len(candidates))
        tail = 1 - sum((i + 1) / 55 for i in candidates)
        assert math.exp(scores.tail_logprobs[row]) == pytest.approx(tail, abs=1e-6)


def flat_example() -> Flat:
    """Two positions, k = 2: tokens 5 (not among the top 2) and 3 (the most likely)."""
    flat = Flat()
    flat.append([])
    flat.append([(5, -3.0), (3, -0.5), (4, -1.5)])
    flat.append([(3, -0.25), (3, -0.25), (9, -2.0)])
    return flat


def test_example() -> None:
    scores = topk_from_lists(flat_example(), np.array([5, 3], np.int32), top_k=2, real_ids=50)
    assert scores.ids.tolist() == [[3, 4], [3, 9]]
    assert scores.logprobs.tolist() == [[-0.5, -1.5], [-0.25, -2.0]]
    assert scores.token_logprobs.tolist() == [-3.0, -0.25]
    tails = [math.log(1 - math.exp(-a) - math.exp(-b)) for a, b in ((0.5, 1.5), (0.25, 2.0))]
    assert scores.tail_logprobs.tolist() == pytest.approx(tails, abs=1e-6)


@pytest.mark.parametrize("index", [0, 2, 5])
def test_nan_is_an_error(index: int) -> None:
    flat = flat_example()
    flat.logprobs[index] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        topk_from_lists(flat, np.array([5, 3], np.int32), top_k=2, real_ids=50)


@pytest.mark.parametrize(
    ("completion", "top_k", "problem"),
    [
        ([5, 4], 2, "not the tokens"),  # as after a shift by one
        ([5, 3], 4, "3] entries for 2 positions, expected 4 or 5 for 2"),
        ([5, 3], 1, "3] entries for 2 positions, expected 1 or 2 for 2"),
        ([6, 7, 5, 3], 2, "for 3 positions, expected 2 or 3 for 4"),
    ],
)
def test_invalid_lists_are_an_error(completion: list[int], top_k: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        topk_from_lists(flat_example(), np.array(completion, np.int32), top_k=top_k, real_ids=50)


@pytest.mark.parametrize(
    ("logprobs", "problem"),
    [
        (np.zeros((2, 2)), r"log-probabilities \(2, 2\), expected \(2, 3\)"),
        (np.zeros((3, 3)), r"\(3, 3\), expected \(2, 3\)"),
        (np.array([[0.0, -1.0, math.nan]] * 2), "NaN"),
    ],
)
def test_invalid_arrays_are_an_error(logprobs: np.ndarray, problem: str) -> None:
    arrays = CompletionArrays(
        np.ones((2, 1), np.int32), logprobs.astype(np.float32), np.ones(2, np.int32)
    )
    with pytest.raises(ValueError, match=problem):
        arrays.scores(2)


def test_arrays_contain_token_entries_and_tail() -> None:
    logprobs = np.array([[-3.0, -0.5, -1.5, -2.0]], dtype=np.float32)
    ids, ranks = np.array([[3, 4]], dtype=np.int32), np.array([9], dtype=np.int32)
    arrays = CompletionArrays(ids, logprobs, ranks)
    unranked = CompletionArrays(ids, logprobs, np.zeros(1, dtype=np.int32)).scores(1)
    assert unranked is not None
    assert unranked.token_ranks is None
    scores = arrays.scores(1)
    assert scores is not None
    assert scores.logprobs.tolist() == [[-0.5, -1.5]]
    assert (scores.token_logprobs[0], scores.tail_logprobs[0]) == (-3.0, -2.0)
    assert scores.token_ranks is not None
    assert scores.token_ranks.tolist() == [9]
    assert arrays.scores(2) is None  # a row was not computed
