"""Figures of translated scores: nothing is wrong with the truth, and each fault has a figure."""

import math
from collections.abc import Mapping

import pytest
import torch

from bench.several_texts import LOWEST
from bench.translation import Figures, measure, server_trainer_loss, word_frequencies
from tests.losses.prefix_pairs import random_pair
from tests.losses.translation.truth import TrueTranslator
from tests.reference.text_model import markov_texts
from tests.reference.translation import SharedTexts

TEXTS: Mapping[str, float] = markov_texts("ab", 4, 0)


def figures_of(names: int, top_k: int = 16) -> Figures:
    shared = SharedTexts(random_pair(3), TEXTS)
    return measure(TrueTranslator(shared, names), shared, TEXTS, LOWEST, top_k)[1]


def test_the_truth_has_no_error() -> None:
    figures = figures_of(names=16)
    assert abs(figures.nats) < 1e-5
    assert figures.named_error < 1e-6
    assert figures.realised_error < 1e-6
    assert figures.named_mass == pytest.approx(1, abs=1e-5)
    assert figures.lost_top1 == figures.lost_at_start == figures.without_signal == 0
    assert figures.extra_rows == 1
    assert figures.rows_outside == 0


def test_likeliest_tokens_without_a_name_are_counted() -> None:
    figures = figures_of(names=0)
    assert figures.named_mass == 0
    assert 0 < figures.lost_top1 < 1  # the realised token is known
    assert 0 < figures.lost_at_start < 1
    assert figures.reported_lost == 0  # is what this translator reports


@pytest.mark.parametrize("top_k", [1, 2, 16])
def test_loss_of_the_server_trainer(top_k: int) -> None:
    student = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()
    support = {1: math.log(0.2), 0: math.log(0.7)}
    entries = [(0.7, 0.5), (0.2, 0.25)][:top_k]
    tails = tuple(1 - sum(side) for side in zip(*entries, strict=True))
    expected = sum(p * math.log(p / q) for p, q in (*entries, tails))
    assert server_trainer_loss(support, student, top_k) == pytest.approx(expected)


def test_nothing_named_has_no_loss() -> None:
    assert server_trainer_loss({}, torch.zeros(3).log_softmax(dim=0).double(), 4) == 0


def test_words_have_frequencies() -> None:
    words = word_frequencies()
    assert len(words) == 200
    assert {"koala", "umbrella", "which"} <= {*words}
    assert min(words.values()) > 0
