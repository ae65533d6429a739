"""Tests of the truncation of rows of logits: kept mass and tail sum to one."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from mopd_server.engines.distributions import (
    concatenate,
    scaled,
    select_candidates,
    select_top_k,
    top_entries,
)

WIDTH = 12
logits = st.lists(
    st.lists(st.floats(-40, 40, width=32), min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=4
)


@given(logits, st.integers(1, 9), st.floats(0.25, 4.0))
def test_top_k_and_tail_equal_the_softmax_without_padding(
    rows: list[list[float]], top_k: int, temperature: float
) -> None:
    padding = torch.zeros(WIDTH, dtype=torch.bool)
    padding[9:] = True
    values = scaled(torch.tensor(rows), padding, temperature)
    tokens = torch.zeros(len(rows), dtype=torch.long)
    scores = concatenate([select_top_k(values, tokens, top_k)])
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
    scores = concatenate([select_top_k(torch.tensor([[0.0, -30.0]]), torch.tensor([0]), 1)])
    assert math.isclose(scores.tail_logprobs[0], -30.0, rel_tol=1e-6)


def test_id_without_probability_is_missing() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0]])
    scores = concatenate([select_top_k(logits, torch.tensor([1]), 3)])
    assert scores.ids.tolist() == [[2, 0, -1]]
    assert scores.token_logprobs[0] == -torch.inf


def test_padding_of_candidates_does_not_remove_id_0_from_the_tail() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0], [3.0, 1.0, 0.0]])
    candidates = torch.tensor([[1, -1], [-1, 0]])
    expected = logits[0].log_softmax(dim=0).double()
    scores = concatenate([select_candidates(logits, torch.tensor([0, 0]), candidates)])
    assert scores.ids.tolist() == [[1, -1], [0, -1]]
    tails = torch.stack([expected[[0, 2]].logsumexp(0), expected[[1, 2]].logsumexp(0)])
    torch.testing.assert_close(torch.tensor(scores.tail_logprobs), tails.float())


@given(
    st.integers(1, 3000) | st.integers(8000, 20000),
    st.integers(1, 200),
    st.sampled_from(["normal", "negative", "ties", "equal", "masked"]),
    st.integers(0, 2**32 - 1),
)
def test_top_entries_equal_a_complete_sort(width: int, k: int, kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((2, width), generator=generator)
    if kind == "negative":
        values -= 9.0
    elif kind == "ties":
        values = (values * 300).round()
    elif kind == "equal":
        values[1] = -1.0
    elif kind == "masked":
        values[torch.rand((2, width), generator=generator) < 0.9] = -torch.inf
    top, columns = top_entries(values, min(k, width))
    torch.testing.assert_close(top, values.sort(dim=1, descending=True).values[:, : min(k, width)])
    torch.testing.assert_close(values.gather(1, columns), top)
    assert all(len(set(row)) == len(row) for row in columns.tolist())


def test_nan_is_not_hidden() -> None:
    for columns in ([5], range(0, 2048, 2)):
        values = torch.randn((2, 2048))
        values[1, columns] = torch.nan
        rows = select_top_k(values, torch.tensor([0, 0]), 8)
        assert rows.tail_logprobs.isnan().tolist() == [False, True]
