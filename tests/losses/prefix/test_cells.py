"""Cells of many random completions, against the values of the slow twin."""

import pytest
import torch

from tests.losses.prefix_problems import prefix_problem
from tests.reference import prefix_kl as slow


@pytest.mark.parametrize("start", range(0, 300, 60))
def test_values_of_random_completions_equal_the_slow_twin(start: int) -> None:
    for seed in range(start, start + 60):
        problem = prefix_problem(seed, completions=1).of_twin()
        targets = problem.targets("forward_kl", 0.0)
        values = problem.pair.value(problem.logits, targets).per_token.detach()
        offset = problem.offsets[0]
        expected = slow.per_token(*problem.sides(0), "forward_kl", 0.0)
        actual = values[offset : offset + len(expected)]
        torch.testing.assert_close(
            actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6, msg=str(seed)
        )


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_completions_are_prepared_together_as_one_by_one(seed: int) -> None:
    problem = prefix_problem(seed, completions=3)
    together = problem.pair.value(
        problem.logits, problem.targets("forward_kl", 0.1), mass_floor=0.1
    )
    separate = torch.zeros_like(together.per_token)
    for comparison, offset in zip(problem.comparisons, problem.offsets, strict=True):
        targets = problem.pair.targets([comparison], [offset], mass_floor=0.1)
        separate += problem.pair.value(problem.logits, targets, mass_floor=0.1).per_token
    torch.testing.assert_close(together.per_token, separate, rtol=0, atol=1e-9)
