"""Cells of many random completions, against the values of the slow twin."""

import pytest
import torch

from tests.losses.prefix_problems import prefix_problem
from tests.reference import prefix_kl as slow


@pytest.mark.parametrize("start", range(0, 300, 60))
def test_values_of_random_completions_equal_the_slow_twin(start: int) -> None:
    for seed in range(start, start + 60):
        problem = prefix_problem(seed, completions=1)
        targets = problem.targets("forward_kl", 0.0)
        values = problem.pair.value(problem.logits, targets).per_token.detach()
        offset = problem.offsets[0]
        expected = slow.per_token(*problem.sides(0), "forward_kl", 0.0)
        actual = values[offset : offset + len(expected)]
        torch.testing.assert_close(
            actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6, msg=str(seed)
        )
