"""The clipped ratio equals its twin in value and gradient, in every way that a head computes it."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mopd_losses.core.blockwise_head import Head, LossTerm, blockwise_head
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.sampled.clipped_ratio import AdvantageTargets, ClippedRatioLoss
from tests.reference.rewards import clipped_loss

WIDTH = 6


@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(1, 5),
    epsilon=st.sampled_from([0.1, 0.3]),
    temperature=st.sampled_from([1.0, 0.7]),
)
def test_value_and_gradient_equal_the_twin(
    seed: int, tokens: int, epsilon: float, temperature: float
) -> None:
    draw = np.random.default_rng(seed)
    positions = np.sort(draw.choice(tokens + 3, tokens, replace=False))
    targets = AdvantageTargets(
        torch.tensor(positions),
        torch.tensor(draw.integers(0, WIDTH, tokens)),
        torch.tensor(draw.normal(-2, 0.7, tokens)),
        torch.tensor(draw.normal(size=tokens)),
    )
    loss = ClippedRatioLoss(epsilon, temperature)
    weight = torch.tensor(draw.normal(size=(WIDTH, 4)))
    hidden = torch.tensor(draw.normal(size=(tokens + 3, 4)))
    logits = (hidden @ weight.T).requires_grad_()
    output = loss(DenseRows(logits, torch.ones(WIDTH, dtype=torch.bool)), targets)
    output.per_token.sum().backward()
    values, gradients = np.zeros(tokens + 3), np.zeros((tokens + 3, WIDTH))
    for row, position in enumerate(positions.tolist()):
        values[position], gradients[position] = clipped_loss(
            logits[position].detach().numpy(),
            int(targets.token_ids[row]),
            float(targets.sampled_logprobs[row]),
            float(targets.advantages[row]),
            epsilon=epsilon,
            temperature=temperature,
        )
    np.testing.assert_allclose(output.per_token.detach().numpy(), values, atol=1e-12)
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), gradients, atol=1e-12)
    expected_compared = np.isin(np.arange(tokens + 3), positions)
    np.testing.assert_array_equal(output.compared.numpy(), expected_compared)

    hidden.requires_grad_()
    term = LossTerm(loss, targets, torch.ones(tokens + 3, dtype=torch.float64))
    head = Head(weight, torch.ones(WIDTH, dtype=torch.bool))
    total, _ = blockwise_head(hidden, head, [term], rows_per_block=2)
    total.backward()
    np.testing.assert_allclose(float(total.detach()), values.sum(), atol=1e-12)
    assert hidden.grad is not None
    np.testing.assert_allclose(hidden.grad.numpy(), gradients @ weight.numpy(), atol=1e-12)


def test_a_ratio_is_clipped_only_where_it_would_move_further() -> None:
    uniform = DenseRows(torch.zeros(4, 2, dtype=torch.float64), torch.ones(2, dtype=torch.bool))
    sampled = torch.tensor([0.25, 0.25, 1.0, 1.0], dtype=torch.float64).log()
    targets = AdvantageTargets(
        torch.arange(4), torch.zeros(4, dtype=torch.int64), sampled, torch.tensor([1.0, -1, 1, -1])
    )
    measured = ClippedRatioLoss()(uniform, targets).measured
    torch.testing.assert_close(
        measured["importance_ratio"], torch.tensor([2.0, 2, 0.5, 0.5]).double()
    )
    assert measured["clipped"].tolist() == [1, 0, 0, 1]
