"""Selections and joins of boundaries do not change the values of the boundaries."""

import pytest
import torch

from mopd_losses.core.student_rows import DenseRows
from mopd_losses.prefix.lookaheads.joined_targets import joined, selected
from mopd_losses.prefix.targets import PrefixTargets
from tests.losses.prefix_pairs import random_completion


@pytest.mark.parametrize("start", range(12))
def test_parts_of_targets_join_to_the_same_values(start: int) -> None:
    completion = random_completion(start)
    pair, targets = completion.pair, completion.pair.targets([completion.comparison])

    def measured(part: PrefixTargets) -> torch.Tensor:
        output = pair.loss()(DenseRows(completion.logits, pair.real_ids), part)
        return torch.stack([output.measured[name] for name in ("student_mass", "teacher_mass")])

    def value(part: PrefixTargets) -> torch.Tensor:
        return pair.value(completion.logits, part).per_token

    order = torch.randperm(len(targets.positions), generator=torch.Generator().manual_seed(start))
    torch.testing.assert_close(measured(selected(targets, order)), measured(targets)[:, order])
    halves = order[::2].sort().values, order[1::2].sort().values
    again = joined(*(selected(targets, half) for half in halves))
    torch.testing.assert_close(value(again), value(targets))
