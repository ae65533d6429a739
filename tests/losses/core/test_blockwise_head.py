"""The block-wise head equals dense autograd, however it is cut, capped, scaled or tied."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopd_losses.config import TopKDivergenceSettings
from mopd_losses.core.blockwise_head import Head, LossTerm, blockwise_head
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss
from mopd_losses.topk.topk_targets import TopKTargets
from tests.losses.topk_problems import random_problem

seeds = st.integers(0, 2**32 - 1)


def dense_total(hidden: Tensor, head: Head, terms: list[LossTerm]) -> Tensor:
    """The formula: all logits at once, under autograd."""
    logits = hidden.double() @ head.weight.double().T
    if head.bias is not None:
        logits = logits + head.bias.double()
    logits = logits * head.scale
    if head.soft_cap is not None:
        logits = head.soft_cap * torch.tanh(logits / head.soft_cap)
    rows = DenseRows(logits, head.real_ids)
    total = torch.zeros((), dtype=torch.float64)
    for term in terms:
        total = total + (term.loss(rows, term.targets).per_token * term.position_weights).sum()
    return total


def terms_of(seed: int, temperature: float) -> tuple[list[LossTerm], int, Tensor]:
    """Two CTKD terms in both directions over one completion; positions, and the real ids."""
    problem = random_problem(seed)
    projection = problem.projection()
    forward = TopKDivergenceLoss(projection, TopKDivergenceSettings(), temperature)
    reverse = TopKDivergenceLoss(projection, TopKDivergenceSettings(divergence="reverse_kl"))
    torch.manual_seed(seed)
    positions = len(problem.logits)
    order = problem.targets.positions.argsort()
    targets = TopKTargets(
        problem.targets.positions[order],
        problem.targets.ids[order],
        problem.targets.logprobs[order],
        problem.targets.tail_logprobs[order],
    )
    terms = [LossTerm(loss, targets, torch.rand(positions)) for loss in (forward, reverse)]
    return terms, positions, projection.real_ids


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@given(seed=seeds, rows_per_block=st.sampled_from([1, 2, 7, 64]), warm=st.booleans())
@settings(deadline=None, max_examples=10)
def test_value_and_gradients_equal_the_dense_form(
    seed: int,
    rows_per_block: int,
    warm: bool,
    dtype: torch.dtype,
    error: float,
    with_bias: bool,
    scale: float,
    soft_cap: float | None,
) -> None:
    terms, positions, real_ids = terms_of(seed, 1.5 if warm else 1.0)
    torch.manual_seed(seed)
    # For a nearly certain student, the remaining mass (and its gradient) is a difference of which
    # float32 keeps few digits, in either form: such logits are tested in float64 only.
    spread = 1.0 if dtype == torch.float64 else 0.3
    hidden = (spread * torch.randn(positions, 5, dtype=dtype)).requires_grad_()
    weight = torch.randn(len(real_ids), 5, dtype=dtype, requires_grad=True)
    bias = torch.randn(len(real_ids), dtype=dtype, requires_grad=True) if with_bias else None
    head = Head(weight, real_ids, bias, scale, soft_cap)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    expected = dense_total(hidden, head, terms)
    expected_gradients = torch.autograd.grad(expected * 3, leaves)
    loss, _ = blockwise_head(hidden, head, terms, rows_per_block=rows_per_block)
    gradients = torch.autograd.grad(loss * 3, leaves)
    torch.testing.assert_close(loss.double(), expected, rtol=error, atol=error)
    for gradient, exact in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, exact, rtol=error, atol=error)


@pytest.mark.parametrize("trained", ["weight", "bias", ""])
def test_a_head_that_is_not_trained_keeps_no_gradient_and_changes_none(trained: str) -> None:
    terms, positions, real_ids = terms_of(1, 1.0)
    hidden = torch.randn(positions, 5, requires_grad=True)
    matrix, offset = torch.randn(len(real_ids), 5), torch.randn(len(real_ids))
    per_selection: list[dict[str, Tensor | None]] = []
    for trainable in ({"weight", "bias"}, {trained}):
        weight = matrix.clone().requires_grad_("weight" in trainable)
        bias = offset.clone().requires_grad_("bias" in trainable)
        hidden.grad = None
        total, _ = blockwise_head(hidden, Head(weight, real_ids, bias), terms)
        kept: Any = total.grad_fn
        assert [tensor is not None for tensor in kept.saved_tensors] == [
            True,
            "weight" in trainable,
            "bias" in trainable,
        ]
        (total * 2).backward()
        per_selection.append({"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad})
    for name in ("hidden", *filter(None, [trained])):
        with_both, with_single = (gradients[name] for gradients in per_selection)
        assert with_both is not None
        assert with_single is not None
        assert torch.equal(with_both, with_single)
