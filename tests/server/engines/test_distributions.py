"""Truncating rows of logits: nothing is lost between what is kept and the tail."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from mopd_server.engines.distributions import join_rows, keep_candidates, keep_top, normalize

WIDTH = 12
logits = st.lists(
    st.lists(st.floats(-40, 40, width=32), min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=4
)


@given(logits, st.integers(1, 9), st.floats(0.25, 4.0))
def test_kept_mass_and_tail_are_the_whole_and_padding_has_none(
    rows: list[list[float]], top_k: int, temperature: float
) -> None:
    padding = torch.zeros(WIDTH, dtype=torch.bool)
    padding[9:] = True
    logprobs = normalize(torch.tensor(rows), padding, temperature)
    tokens = torch.zeros(len(rows), dtype=torch.long)
    scores = join_rows([keep_top(logprobs, tokens, top_k)])
    for row, values in enumerate(rows):
        weights = [math.exp((v - max(values[:9])) / temperature) for v in values[:9]]
        expected = sorted((math.log(w / math.fsum(weights)) for w in weights), reverse=True)
        torch.testing.assert_close(
            torch.tensor(scores.logprobs[row]), torch.tensor(expected[:top_k]), atol=1e-4, rtol=1e-4
        )
        kept = math.fsum(math.exp(v) for v in scores.logprobs[row].tolist())
        assert math.isclose(kept + math.exp(scores.tail_logprobs[row]), 1.0, abs_tol=1e-5)
        assert scores.ids[row].max() < 9


def test_a_small_tail_keeps_its_precision() -> None:
    """One minus the kept mass would be zero in float32, and noise at best."""
    rows = normalize(torch.tensor([[0.0, -30.0]]), torch.zeros(2, dtype=torch.bool), 1.0)
    scores = join_rows([keep_top(rows, torch.tensor([0]), 1)])
    assert math.isclose(scores.tail_logprobs[0], -30.0, rel_tol=1e-6)


def test_an_id_without_probability_is_absent() -> None:
    rows = torch.tensor([[0.0, -torch.inf, 1.0]])
    logprobs = normalize(rows, torch.zeros(3, dtype=torch.bool), 1.0)
    scores = join_rows([keep_top(logprobs, torch.tensor([1]), 3)])
    assert scores.ids.tolist() == [[2, 0, -1]]
    assert scores.token_logprobs[0] == -torch.inf


def test_absent_candidates_do_not_take_id_0_out_of_the_tail() -> None:
    rows = torch.tensor([[3.0, 1.0, 0.0], [3.0, 1.0, 0.0]])
    candidates = torch.tensor([[1, -1], [-1, 0]])
    logprobs = normalize(rows, torch.zeros(3, dtype=torch.bool), 1.0)
    expected = logprobs[0].double()
    scores = join_rows([keep_candidates(logprobs, torch.tensor([0, 0]), candidates)])
    assert scores.ids.tolist() == [[1, -1], [0, -1]]
    tails = torch.stack([expected[[0, 2]].logsumexp(0), expected[[1, 2]].logsumexp(0)])
    torch.testing.assert_close(torch.tensor(scores.tail_logprobs), tails.float())
