"""Tests of the truncation of rows of logits: kept mass and tail sum to one."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from mopd_server.engines.distributions import (
    concatenate,
    normalize,
    select_candidates,
    select_top_k,
)

WIDTH = 12
logits = st.lists(
    st.lists(st.floats(-40, 40, width=32), min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=4
)


def normalized(*rows: list[float]) -> torch.Tensor:
    return normalize(torch.tensor(rows), torch.zeros(len(rows[0]), dtype=torch.bool), 1.0)


@given(logits, st.integers(1, 9), st.floats(0.25, 4.0))
def test_top_k_and_tail_equal_the_softmax_without_padding(
    rows: list[list[float]], top_k: int, temperature: float
) -> None:
    padding = torch.zeros(WIDTH, dtype=torch.bool)
    padding[9:] = True
    logprobs = normalize(torch.tensor(rows), padding, temperature)
    tokens = torch.zeros(len(rows), dtype=torch.long)
    scores = concatenate([select_top_k(logprobs, tokens, top_k)])
    for row, values in enumerate(rows):
        weights = [math.exp((v - max(values[:9])) / temperature) for v in values[:9]]
        expected = sorted((math.log(w / math.fsum(weights)) for w in weights), reverse=True)
        torch.testing.assert_close(
            torch.tensor(scores.logprobs[row]), torch.tensor(expected[:top_k]), atol=1e-4, rtol=1e-4
        )
        kept = math.fsum(math.exp(v) for v in scores.logprobs[row].tolist())
        assert math.isclose(kept + math.exp(scores.tail_logprobs[row]), 1.0, abs_tol=1e-5)
        assert scores.ids[row].max() < 9


def test_small_tail_keeps_its_precision() -> None:
    """One minus the kept mass would be zero in float32."""
    scores = concatenate([select_top_k(normalized([0.0, -30.0]), torch.tensor([0]), 1)])
    assert math.isclose(scores.tail_logprobs[0], -30.0, rel_tol=1e-6)


def test_id_without_probability_is_missing() -> None:
    logprobs = normalized([0.0, -math.inf, 1.0])
    scores = concatenate([select_top_k(logprobs, torch.tensor([1]), 3)])
    assert scores.ids.tolist() == [[2, 0, -1]]
    assert scores.token_logprobs[0] == -torch.inf


def test_padding_of_candidates_does_not_remove_id_0_from_the_tail() -> None:
    logprobs = normalized([3.0, 1.0, 0.0], [3.0, 1.0, 0.0])
    candidates = torch.tensor([[1, -1], [-1, 0]])
    expected = logprobs[0].double()
    scores = concatenate([select_candidates(logprobs, torch.tensor([0, 0]), candidates)])
    assert scores.ids.tolist() == [[1, -1], [0, -1]]
    tails = torch.stack([expected[[0, 2]].logsumexp(0), expected[[1, 2]].logsumexp(0)])
    torch.testing.assert_close(torch.tensor(scores.tail_logprobs), tails.float())
