"""Every loss of the same-vocabulary family costs the same in blocks as on all logits at once."""

import pytest
import torch

from mopd_losses.core.blockwise_head import Head, LossTerm, blockwise_head
from mopd_losses.core.cross_entropy import SftLoss
from mopd_losses.core.loss import Loss
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.sampled.k2_k3 import K2Loss, K3Loss
from mopd_losses.sampled.policy_gradient import PolicyGradientLoss
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss
from tests.losses.judged_completions import STUDENT_SIZE, TEACHER_SIZE, several
from tests.losses.measures import TRUNCATED, name_of
from tests.losses.places import device_projection

#: One padding row, one student token that reaches no teacher token, several that share one.
WEIGHTS = torch.zeros(STUDENT_SIZE + 1, TEACHER_SIZE, dtype=torch.float64)
WEIGHTS[[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 3, 5]] = 1
REAL = torch.arange(STUDENT_SIZE + 1) < STUDENT_SIZE
PROJECTION = device_projection(WEIGHTS.numpy(), REAL.numpy())

LOSSES: dict[str, Loss] = {
    name_of(settings): TopKDivergenceLoss(PROJECTION, settings) for settings in TRUNCATED
}
LOSSES |= {
    "warm": TopKDivergenceLoss(
        PROJECTION, TRUNCATED[0].model_copy(update={"kd_temperature": 2.0}), teacher_temperature=3.0
    ),
    "policy_gradient": PolicyGradientLoss(max_ratio=1.1),
    "k2": K2Loss(),
    "k3": K3Loss(),
    "sft": SftLoss(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rows_per_block", [1, 2, 7])
def test_in_blocks_and_at_once_value_gradients_and_measurements_are_the_same(
    name: str, rows_per_block: int
) -> None:
    comparisons, offsets, slots = several(seed=3)
    loss = LOSSES[name]
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((slots, 5), (len(REAL), 5), (len(REAL),))
    )
    slot_weights = torch.rand(slots, generator=generator, dtype=torch.float64)
    targets = loss.targets(comparisons, offsets)
    dense = loss(DenseRows(hidden @ weight.T + bias, REAL), targets)
    assert dense.per_token.any()
    expected = (dense.per_token * slot_weights).sum()
    expected_gradients = torch.autograd.grad(expected, [hidden, weight, bias])
    found, (output,) = blockwise_head(
        hidden,
        Head(weight, REAL, bias),
        [LossTerm(loss, targets, slot_weights)],
        rows_per_block=rows_per_block,
    )
    gradients = torch.autograd.grad(found, [hidden, weight, bias])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(output.per_token, dense.per_token)
    for gradient, exact in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, exact)
    assert set(output.measured) == set(dense.measured)
    for measured, exact in dense.measured.items():
        torch.testing.assert_close(output.measured[measured], exact)
