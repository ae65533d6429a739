"""Prefix KL without the bounds of what is over tokens that were not sampled."""

from itertools import accumulate

import pytest

from bench.byte_models import false_loss, merging_pair
from mopd_losses.core.loss import AlignedPair
from tests.losses.prefix_pairs import Pair, compared, model_rows, rows_of, with_lookaheads
from tests.reference.text_model import TokenModel, markov_texts

#: Two tokenizers that merge, and texts on which their bounds matter.
PAIR, TEXTS = merging_pair(8, "ab", 6), markov_texts("ab", 4, 8)


@pytest.mark.parametrize("bounds", [True, False])
def test_bounds_are_of_both_sides_or_there_are_none(bounds: bool) -> None:
    names: set[str] = set()
    for pair in (PAIR, Pair(PAIR.teacher, PAIR.student)):
        targets = pair.targets(*comparisons(pair), bounds=bounds)
        names |= {
            name
            for name, is_present in (
                ("bounding", len(targets.bounding.boundaries) > 0),
                ("missing", not targets.missing.isneginf().all()),
                ("teacher_bounds", not targets.teacher_bounds.isneginf().all()),
                ("teacher_missing", bool(targets.teacher_missing.any())),
            )
            if is_present
        }
    expected = {"bounding", "missing", "teacher_bounds", "teacher_missing"}
    assert names == (expected if bounds else set())


def comparisons(pair: Pair) -> tuple[list[AlignedPair], list[int]]:
    """All texts, and where each begins."""
    student = TokenModel(TEXTS, pair.student.tokenize)
    teacher = TokenModel(TEXTS, pair.teacher.tokenize)
    results: list[AlignedPair] = []
    for text in TEXTS:
        ids = pair.student.ids(student.written[text]), pair.teacher.ids(teacher.written[text])
        comparison = compared(pair, *ids, model_rows(pair.teacher, teacher, text), k=16)
        results.append(with_lookaheads(pair, comparison, rows_of(pair.teacher, teacher)))
    return results, [0, *accumulate(len(each.student) for each in results)][:-1]


def test_models_that_agree_have_a_loss_without_bounds() -> None:
    values = [false_loss(PAIR, TEXTS, top_k=64, bounds=bounds) for bounds in (True, False)]
    assert values[0] <= 0.004
    assert values[1] > 0.05
