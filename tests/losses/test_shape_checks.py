"""Shapes are checked in tests, and cost nothing outside of them."""

import subprocess
import sys

import pytest
import torch
from jaxtyping import TypeCheckError

from mopd_losses.core.student_rows import DenseRows
from mopd_losses.divergences.divergences import forward_kl
from mopd_losses.divergences.truncation import with_tail_bucket
from mopd_losses.topk.topk_targets import TopKTargets

ROWS = torch.zeros(2, 3)


def test_two_distributions_on_different_vocabularies_are_refused() -> None:
    with pytest.raises(TypeCheckError, match="teacher"):
        forward_kl(ROWS, torch.zeros(2, 4))
    with pytest.raises(TypeCheckError, match="teacher"):
        forward_kl(ROWS, torch.zeros(1, 3))  # plain arithmetic would broadcast it


def test_a_tail_for_other_rows_is_refused() -> None:
    retained = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(TypeCheckError, match="teacher_tail"):
        with_tail_bucket(ROWS, ROWS, torch.zeros(3), retained)
    with pytest.raises(TypeCheckError, match="retained"):
        with_tail_bucket(ROWS, ROWS, torch.zeros(2), retained.float())


def test_targets_whose_fields_disagree_are_refused() -> None:
    positions, ids = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
    assert TopKTargets(positions, ids, ROWS, torch.zeros(2)).ids.shape == (2, 3)
    with pytest.raises(TypeCheckError, match="logprobs"):
        TopKTargets(positions, ids, torch.zeros(2, 4), torch.zeros(2))
    with pytest.raises(TypeCheckError, match="positions"):
        TopKTargets(positions.float(), ids, ROWS, torch.zeros(2))


def test_ids_for_other_positions_are_refused() -> None:
    rows = DenseRows(ROWS, torch.ones(3, dtype=torch.bool))
    with pytest.raises(TypeCheckError, match="ids"):
        rows.logprobs(torch.tensor([0, 1]), torch.tensor([2]))


@pytest.mark.smoke
def test_outside_of_tests_nothing_is_checked() -> None:
    script = """
import sys, torch
from mopd_losses.topk.topk_targets import TopKTargets
TopKTargets(torch.zeros(2), torch.zeros(5), torch.zeros(7), torch.zeros(1))
print("beartype" in sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "False\n"
