"""vLLM's flat lists against the distributions that they were made of."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_server.engines.vllm.flat_logprobs import (
    PromptArrays,
    padded_rows,
    topk_of_arrays,
    topk_of_flat,
    truncated,
)
from tests.reference.flat_logprobs_by_hand import Flat, flat_of, rows_by_hand

#: Few and round, so that ties and impossible tokens are common.
LOGITS = st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 0.0, 2.0, 9.0])


def log_softmax(logits: list[float]) -> list[float]:
    """In float32, as an engine says it."""
    total = math.log(sum(math.exp(x) for x in logits))
    return [float(np.float32(x - total)) for x in logits]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[list[float]], list[int], int, int]:
    """Distributions, the tokens they predict, how many are completion, and k."""
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
def test_rows_are_the_distributions_that_predict_the_completion(
    sequence: tuple[list[list[float]], list[int], int, int], once: bool
) -> None:
    distributions, tokens, rows, top_k = sequence
    flat = flat_of(distributions, tokens, top_k, once=once)
    completion = np.array(tokens[-rows:], dtype=np.int32)
    scores = topk_of_flat(flat, completion, top_k=top_k, real_ids=len(distributions[0]))
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


def test_a_tail_is_never_less_than_a_token_that_is_known_to_be_in_it() -> None:
    # A certain teacher: the log-softmax of its favourite rounds to 0, which leaves nothing of one.
    ids, logprobs = np.array([[0]]), np.zeros((1, 1), dtype=np.float32)
    unlikely = np.array([-25.0], dtype=np.float32)
    scores = truncated(ids, logprobs, np.array([7]), unlikely, real_ids=100)
    assert scores.tail_logprobs[0] == -25.0


def test_rounding_above_one_leaves_nothing() -> None:
    logprobs = np.array([[np.log(0.5), np.log(0.5) + 1e-6]], dtype=np.float32)
    scores = truncated(np.array([[0, 1]]), logprobs, np.array([0]), logprobs[:, 0], real_ids=100)
    assert np.isneginf(scores.tail_logprobs[0])


@given(st.lists(st.lists(st.integers(0, 9), unique=True, max_size=4), min_size=1, max_size=5))
def test_candidates_are_sorted_and_absent_ones_stay_absent(rows: list[list[int]]) -> None:
    chances = np.log(np.arange(1, 11, dtype=np.float32) / 55)
    width = max(map(len, rows))
    ids = padded_rows([np.array(row, dtype=np.int32) for row in rows], width)
    found = np.where(ids < 0, -np.inf, chances[ids]).astype(np.float32)
    tokens = np.full(len(rows), 9)
    scores = truncated(ids, found, tokens, np.full(len(rows), chances[9]), real_ids=10)
    for row, asked in enumerate(rows):
        expected = sorted(asked, reverse=True)  # the larger the id, the likelier here
        assert scores.ids[row].tolist() == expected + [-1] * (width - len(asked))
        left = 1 - sum((i + 1) / 55 for i in asked)
        assert math.exp(scores.tail_logprobs[row]) == pytest.approx(left, abs=1e-6)


def flat_example() -> Flat:
    """Two positions, k = 2: tokens 5 (not among the top 2) and 3 (the likeliest)."""
    flat = Flat()
    flat.append([])
    flat.append([(5, -3.0), (3, -0.5), (4, -1.5)])
    flat.append([(3, -0.25), (3, -0.25), (9, -2.0)])
    return flat


def test_an_example_by_hand() -> None:
    scores = topk_of_flat(flat_example(), np.array([5, 3], np.int32), top_k=2, real_ids=50)
    assert scores.ids.tolist() == [[3, 4], [3, 9]]
    assert scores.logprobs.tolist() == [[-0.5, -1.5], [-0.25, -2.0]]
    assert scores.token_logprobs.tolist() == [-3.0, -0.25]
    left = [math.log(1 - math.exp(-0.5) - math.exp(-1.5)), -3.0]
    left[1] = math.log(1 - math.exp(-0.25) - math.exp(-2.0))
    assert scores.tail_logprobs.tolist() == pytest.approx(left, abs=1e-6)


def test_nan_is_an_error_wherever_it_stands() -> None:
    for place in (0, 2, 5):
        flat = flat_example()
        flat.logprobs[place] = math.nan
        with pytest.raises(ValueError, match="computed NaN"):
            topk_of_flat(flat, np.array([5, 3], np.int32), top_k=2, real_ids=50)


@pytest.mark.parametrize(
    ("completion", "top_k", "sentence"),
    [
        ([5, 4], 2, "not the tokens that it was given"),  # as after a shift by one
        ([5, 3], 4, "3] entries for 2 positions; expected 4 or 5 for 2"),
        ([5, 3], 1, "3] entries for 2 positions; expected 1 or 2 for 2"),
        ([6, 7, 5, 3], 2, "for 3 positions; expected 2 or 3 for 4"),
    ],
)
def test_lists_of_another_form_are_refused(
    completion: list[int], top_k: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        topk_of_flat(flat_example(), np.array(completion, np.int32), top_k=top_k, real_ids=50)


@given(sequences())
def test_arrays_are_read_as_the_lists_that_vllm_makes_of_them(
    sequence: tuple[list[list[float]], list[int], int, int],
) -> None:
    distributions, tokens, rows, top_k = sequence
    top_k = min(top_k, len(distributions[0]))  # arrays have one width: an engine gives no fewer
    flat = flat_of(distributions, tokens, top_k, once=False)
    shape = (len(tokens) - 1, top_k + 1)
    arrays = PromptArrays(
        np.array(flat.token_ids).reshape(shape),
        np.array(flat.logprobs, dtype=np.float32).reshape(shape),
    )
    completion = np.array(tokens[-rows:], dtype=np.int32)
    size = {"top_k": top_k, "real_ids": len(distributions[0])}
    from_arrays = topk_of_arrays(arrays, completion, **size)
    from_lists = topk_of_flat(flat, completion, **size)
    for name in ("ids", "logprobs", "token_logprobs", "tail_logprobs"):
        assert np.array_equal(getattr(from_arrays, name), getattr(from_lists, name)), name


def test_arrays_of_another_sequence_or_width_are_refused() -> None:
    ids = np.array([[1, 1, 2], [2, 2, 1]])
    arrays = PromptArrays(ids, np.log([[0.5, 0.5, 0.4], [0.5, 0.5, 0.4]]).astype(np.float32))
    size = {"top_k": 2, "real_ids": 4}
    assert len(topk_of_arrays(arrays, np.array([1, 2], dtype=np.int32), **size)) == 2
    with pytest.raises(ValueError, match="not the tokens"):
        topk_of_arrays(arrays, np.array([2, 2], dtype=np.int32), **size)
    with pytest.raises(ValueError, match="3 entries"):
        topk_of_arrays(arrays, np.array([1, 2], dtype=np.int32), top_k=3, real_ids=4)
    with pytest.raises(ValueError, match="for 2 positions; expected 3 for 3"):
        topk_of_arrays(arrays, np.array([1, 1, 2], dtype=np.int32), **size)
    with pytest.raises(ValueError, match="one shape"):
        PromptArrays(ids, np.zeros((2, 2), dtype=np.float32))
