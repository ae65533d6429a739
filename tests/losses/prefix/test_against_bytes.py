"""Prefix KL, compared with the exact next-byte distributions of both models.

The oracle (``tests/reference/byte_model.py``) is the divergence of the two models as distributions
over texts: at each byte of a text it compares what follows it, with rows after tokens that were
not sampled. In expectation over the teacher's texts it is KL(teacher || student) of texts, and it
is 0 for models that agree. Prefix KL has the rows of the sampled tokens, and lookaheads, only. It
compares at the boundaries of tokens, so its sum over a text is neither an upper nor a lower bound
of the oracle's: a cell may be compared again inside a longer token, and mass within the bounds is
not compared. What is required is that it is nothing where the oracle is nothing, and of the
oracle's size elsewhere: over the teacher's texts 0.77 to 1.62 times, with a median of 1.01, for the
22 pairs of the seeds below 11.
"""

import math
from collections.abc import Mapping
from functools import cache

import pytest

from bench.byte_models import LOWEST, merging_pair
from tests.losses.byte_sides import exact_side
from tests.losses.prefix_pairs import (
    Pair,
    compared,
    model_rows,
    random_pair,
    rows_of,
    with_lookaheads,
)
from tests.reference.byte_model import divergence
from tests.reference.text_model import TokenModel, markov_texts

Values = Mapping[str, float]


@cache
def problem(seed: int, *, by_merges: bool, equal: bool) -> tuple[Pair, Values, Values]:
    """Two tokenizers, and the probabilities of a teacher's and a student's texts."""
    pair = merging_pair(seed, "ab", 6) if by_merges else random_pair(seed)
    teacher = markov_texts("ab", 4, seed)
    return pair, teacher, teacher if equal else markov_texts("ab", 4, seed + 1_000)


def oracle(pair: Pair, teacher: Values, student: Values) -> Values:
    """Text -> nats of KL(teacher || student), summed over the bytes."""
    own = exact_side(pair.teacher, teacher, least_share=0.0)
    other = exact_side(pair.student, student, least_share=0.0)
    return {
        text: float(divergence(*(side.next_bytes(text.encode()) for side in (own, other))).sum())
        for text in teacher
    }


def prefix_kl(pair: Pair, teacher: Values, student: Values, *, bounds: bool = True) -> Values:
    """Text -> nats of prefix KL with all lookaheads, summed over the student's tokens."""
    own = TokenModel(dict(student), pair.student.tokenize)
    other = TokenModel(dict(teacher), pair.teacher.tokenize)
    values: dict[str, float] = {}
    for text in teacher:
        ids = pair.student.ids(own.written[text]), pair.teacher.ids(other.written[text])
        comparison = compared(pair, *ids, model_rows(pair.teacher, other, text), k=16)
        comparison = with_lookaheads(pair, comparison, rows_of(pair.teacher, other))
        targets = pair.targets([comparison], bounds=bounds)
        logits = model_rows(pair.student, own, text).clamp_min(LOWEST)
        values[text] = pair.value(logits, targets).per_token.sum().item()
    return values


def expectation(probabilities: Values, values: Values) -> float:
    return math.fsum(mass * values[text] for text, mass in probabilities.items())


@pytest.mark.parametrize("by_merges", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_models_that_agree_differ_by_nothing(seed: int, by_merges: bool) -> None:
    pair, texts, _ = problem(seed, by_merges=by_merges, equal=True)
    assert max(map(abs, oracle(pair, texts, texts).values())) < 1e-9
    assert abs(expectation(texts, prefix_kl(pair, texts, texts))) < 1e-3


@pytest.mark.parametrize("by_merges", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_expected_loss_over_texts_is_of_the_size_of_the_divergence_of_texts(
    seed: int, by_merges: bool
) -> None:
    pair, teacher, student = problem(seed, by_merges=by_merges, equal=False)
    exact = expectation(teacher, oracle(pair, teacher, student))
    direct = math.fsum(mass * math.log(mass / student[text]) for text, mass in teacher.items())
    assert exact == pytest.approx(direct)
    loss = expectation(teacher, prefix_kl(pair, teacher, student))
    assert 0.7 * exact < loss < 1.7 * exact


def test_without_bounds_the_expected_loss_is_too_high_by_what_models_that_agree_have() -> None:
    pair, teacher, student = problem(1, by_merges=True, equal=False)
    exact = expectation(teacher, oracle(pair, teacher, student))
    assert expectation(teacher, prefix_kl(pair, teacher, student, bounds=False)) > 1.15 * exact
    assert expectation(teacher, prefix_kl(pair, teacher, teacher, bounds=False)) > 0.2
