"""Several teachers of one vocabulary as one."""

import math

import numpy as np
import pytest
import torch

from mopd_losses.divergences.divergences import reverse_kl
from mopd_losses.topk.product_of_experts import product_of_experts
from mopd_protocol.errors import DataError

ONE = ["a" * 64] * 2


def two_teachers() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.tensor(np.random.default_rng(0).normal(size=(2, 5, 7)) * 3)
    first, second = logits.log_softmax(dim=2)
    return first, second


def test_it_is_the_normalised_geometric_mean() -> None:
    first, second = two_teachers()
    found = product_of_experts([first, second], [3, 1], fingerprints=ONE)
    for row in range(5):
        raw = [
            math.exp(a) ** 0.75 * math.exp(b) ** 0.25
            for a, b in zip(first[row].tolist(), second[row].tolist(), strict=True)
        ]
        expected = [value / math.fsum(raw) for value in raw]
        np.testing.assert_allclose(found[row].exp().numpy(), expected, rtol=1e-12)


def test_it_is_the_softmax_of_mean_logits_whatever_they_are_shifted_by() -> None:
    first, second = two_teachers()
    found = product_of_experts([first + 40, second - 7], [1, 1], fingerprints=ONE)
    torch.testing.assert_close(found, ((first + second) / 2).log_softmax(dim=1))


def test_one_teacher_and_equal_teachers_are_themselves() -> None:
    first, _ = two_teachers()
    torch.testing.assert_close(product_of_experts([first], [0.2], fingerprints=ONE[:1]), first)
    both = product_of_experts([first, first], [5, 1], fingerprints=ONE)
    torch.testing.assert_close(both, first)


def test_no_distribution_has_a_smaller_mean_divergence_to_the_teachers() -> None:
    first, second = two_teachers()
    best = product_of_experts([first, second], [2, 1], fingerprints=ONE)

    def cost(of: torch.Tensor) -> torch.Tensor:
        return 2 * reverse_kl(of, first) + reverse_kl(of, second)

    draw = np.random.default_rng(1)
    for _ in range(50):
        nearby = (best + torch.tensor(draw.normal(size=(5, 7))) * 0.1).log_softmax(dim=1)
        assert (cost(nearby) >= cost(best) - 1e-12).all()


def test_an_id_that_one_teacher_rules_out_is_ruled_out() -> None:
    first, second = two_teachers()
    first[:, 2] = -torch.inf
    found = product_of_experts([first, second], [1, 9], fingerprints=ONE)
    assert torch.isneginf(found[:, 2]).all()
    torch.testing.assert_close(found.exp().sum(dim=1), torch.ones(5, dtype=torch.float64))


def test_half_precision_is_raised() -> None:
    first, second = (teacher.bfloat16() for teacher in two_teachers())
    found = product_of_experts([first, second], [1, 1], fingerprints=ONE)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.exp().sum(dim=1), torch.ones(5))


def test_no_rows_are_no_rows() -> None:
    nothing = torch.zeros(0, 7)
    assert product_of_experts([nothing] * 2, [1, 1], fingerprints=ONE).shape == (0, 7)


def test_what_has_no_product_is_refused_with_the_reason() -> None:
    first, second = two_teachers()
    refused = [
        ([], [], [], "at least one teacher"),
        ([first, second], [1], ONE, "2 teachers with 1 weights and 2 fingerprints"),
        ([first, second], [1, 1], ["a" * 64, "b" * 64], "tokenizers aaaaaaaaaaaa, bbbbbbbbbbbb"),
        ([first, second[:, :6]], [1, 1], ONE, r"shapes \(5, 7\), \(5, 6\)"),
        ([first, second[:4]], [1, 1], ONE, r"shapes \(5, 7\), \(4, 7\)"),
        ([first, second], [1, 0], ONE, "each above 0"),
        ([first, second], [1, math.nan], ONE, "each above 0"),
    ]
    for teachers, weights, fingerprints, reason in refused:
        with pytest.raises(DataError, match=reason):
            product_of_experts(teachers, weights, fingerprints=fingerprints)
    first[3, :4] = -torch.inf
    second[3, 4:] = -torch.inf
    with pytest.raises(DataError, match="row 3: the teachers can say no id in common"):
        product_of_experts([first, second], [1, 1], fingerprints=ONE)
