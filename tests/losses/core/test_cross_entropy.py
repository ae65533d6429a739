"""Cross entropy on given labels, and its share of the total."""

import math

import numpy as np
import pytest
import torch

from mopd_losses.core.blockwise_head import Head, LossTerm, blockwise_head
from mopd_losses.core.cross_entropy import (
    IGNORED,
    LabelTargets,
    SftLoss,
    label_targets,
    mixed_terms,
)
from mopd_losses.core.student_rows import DenseRows
from tests.losses.scored_completions import STUDENT_SIZE, several

REAL = torch.ones(4, dtype=torch.bool)


def random_logits(positions: int, width: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(positions, width, dtype=torch.float64, generator=generator).requires_grad_()


def test_it_is_torchs_cross_entropy_with_ignored_labels() -> None:
    logits = random_logits(6)
    labels = torch.tensor([2, IGNORED, 0, 3, IGNORED, 1])
    losses = SftLoss()(DenseRows(logits, REAL), label_targets(labels)).per_token
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(losses, expected)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(gradient, expected_gradient)
    assert (gradient[[1, 4]] == 0).all()


def test_it_is_minus_the_log_of_the_labels_probability() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    losses = SftLoss()(DenseRows(logits, REAL), label_targets(torch.tensor([2]))).per_token
    assert losses.item() == pytest.approx(3 * math.log(2))


def test_a_completions_own_tokens_are_its_labels_wherever_its_positions_begin() -> None:
    comparisons, offsets, positions = several(seed=0)
    targets = SftLoss().targets(comparisons, offsets)
    assert targets.positions.tolist() == [0, 1, 2, 3, 7, 8, 9, 10, 11]
    ids = np.concatenate([c.student.token_ids for c in comparisons])
    assert targets.labels.tolist() == ids.tolist()
    rows = DenseRows(
        random_logits(positions, STUDENT_SIZE), torch.ones(STUDENT_SIZE, dtype=torch.bool)
    )
    assert (
        SftLoss()(rows, targets).per_token.nonzero().flatten().tolist()
        == targets.positions.tolist()
    )


def test_targets_are_cut_by_positions() -> None:
    targets = label_targets(torch.tensor([2, IGNORED, 0, 3, IGNORED, 1]))
    part = targets.between(1, 4)
    assert (part.positions.tolist(), part.labels.tolist()) == ([1, 2], [0, 3])
    assert not targets.uncuttable(6).any()
    assert targets.uncuttable(6).shape == (7,)


@pytest.mark.parametrize("positions", [0, 3])
def test_no_label_costs_nothing_and_keeps_its_graph(positions: int) -> None:
    for targets in (
        label_targets(torch.full((positions,), IGNORED)),
        SftLoss().targets([], []),
        LabelTargets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)),
    ):
        logits = random_logits(positions)
        losses = SftLoss()(DenseRows(logits, REAL), targets.to("cpu")).per_token
        assert losses.tolist() == [0] * positions
        losses.sum().backward()
        assert logits.grad is not None
        assert (logits.grad == 0).all()


@pytest.mark.parametrize("shares", [[0.0] * 5, [0.3] * 5, [1.0] * 5, [1.0, 0.3, 0.0, 1.0, 0.7]])
def test_every_position_is_shared_between_its_label_and_its_teachers(shares: list[float]) -> None:
    hidden, weight = random_logits(5), random_logits(4)
    weights = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
    labels = [torch.tensor(row) for row in ([0, 1, 2, 3, 0], [3, IGNORED, 1, 0, 2], [1] * 5)]
    supervised, *distilled = [
        LossTerm(SftLoss(), label_targets(row), weights * factor)
        for row, factor in zip(labels, (1.0, 0.25, 0.75), strict=True)
    ]
    share = torch.tensor(shares, dtype=torch.float64)
    mixed = mixed_terms(supervised, distilled, distill_weights=share)
    total, _ = blockwise_head(hidden, Head(weight, REAL), mixed)
    _, (own, *distilled_outputs) = blockwise_head(
        hidden, Head(weight, REAL), [supervised, *distilled]
    )
    taught = 0.25 * distilled_outputs[0].per_token + 0.75 * distilled_outputs[1].per_token
    expected = (weights * ((1 - share) * own.per_token + share * taught)).sum()
    torch.testing.assert_close(total, expected)
    assert torch.equal(supervised.position_weights, weights)  # terms are values
