"""Importance weights of sampled tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_losses.alignment.byte_alignment import align
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.config.settings import UNWEIGHTED, ImportanceConfig
from mopd_trainer.data.importance import importance_weights
from tests.reference.importance import importance_weights as reference
from tests.trainer.scored_examples import example
from tests.trainer.students import ids_of, rollout

#: A token in nats.
_NATS = st.floats(-8, -0.0078125, width=32)

_EXAMPLE = example(rollout("digit", ids_of("digit", "7"), teachers={"math": 1.0}))

#: The teacher's probability of its likeliest token; all others have the rest.
_LIKELIEST = 0.75

Side = tuple[list[int], list[float]]


@st.composite
def _sides(draw: st.DrawFn) -> tuple[Side, Side]:
    """Draw two tokenizations of one text: where their tokens end, and the log-probabilities."""
    size = draw(st.integers(1, 24))
    sides: list[Side] = []
    for _ in range(2):
        inner = draw(st.sets(st.integers(1, size - 1))) if size > 1 else set()
        ends = [*sorted(inner), size]
        nats = draw(st.lists(_NATS, min_size=len(ends), max_size=len(ends)))
        sides.append((ends, nats))
    return sides[0], sides[1]


def weights_of(
    student: Side, teacher: Side, config: ImportanceConfig, temperature: float = 1
) -> list[float]:
    text = bytes(range(student[0][-1]))
    own, other = (TokenSequence(range(len(s[0])), s[0], text) for s in (student, teacher))
    [score] = _EXAMPLE.scores
    sampled = replace(
        _EXAMPLE.rollout,
        completion=own,
        sampled_logprobs=np.array(student[1]),
        finish_reason="length",
    )
    rows = len(other)
    topk = TopKLogprobs(
        ids=np.zeros((rows, 1), dtype=np.int32),
        logprobs=np.log(np.full((rows, 1), _LIKELIEST)),
        token_logprobs=np.array(teacher[1]),
        tail_logprobs=np.log(np.full(rows, 1 - _LIKELIEST)),
    )
    scored = replace(score, score=TeacherScore("m" * 32, other, topk), alignment=align(own, other))
    return importance_weights(sampled, scored, config, temperature=temperature).tolist()


@given(sides=_sides(), least=st.floats(0.001, 1), discount=st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_weights_are_the_discounted_ratios_of_the_text_before_each_token(
    sides: tuple[Side, Side], least: float, discount: float
) -> None:
    config = ImportanceConfig(least=least, discount=discount)
    expected = reference(*sides[0], *sides[1], least=least, discount=discount)
    assert weights_of(*sides, config) == pytest.approx(expected, rel=1e-5)


@given(ends=st.sets(st.integers(1, 30), min_size=1), nats=_NATS)
def test_every_weight_is_one_if_both_sides_have_the_same_distribution(
    ends: set[int], nats: float
) -> None:
    side = sorted(ends), [nats] * len(ends)
    assert weights_of(side, side, ImportanceConfig(least=0.1)) == [1.0] * len(ends)


@given(sides=_sides(), temperature=st.sampled_from([0.5, 0.6, 2.0]))
def test_the_teacher_is_compared_at_the_temperature_of_the_sample(
    sides: tuple[Side, Side], temperature: float
) -> None:
    config = ImportanceConfig(least=0.01)
    likely, rest = _LIKELIEST ** (1 / temperature), (1 - _LIKELIEST) ** (1 / temperature)
    ends, nats = sides[1]
    tempered = ends, [each / temperature - math.log(likely + rest) for each in nats]
    expected = reference(*sides[0], *tempered, least=0.01, discount=config.discount)
    assert weights_of(*sides, config, temperature) == pytest.approx(expected, rel=1e-4)


def test_greedy_samples_are_compared_with_the_teachers_probabilities() -> None:
    side = [1, 2], [0.0, 0.0]
    assert weights_of(side, ([1, 2], [-1.0, 0.0]), ImportanceConfig(), 0) == pytest.approx(
        [1, math.exp(-1)]
    )


def _sums(nats: Sequence[float], least: float, discount: float) -> list[float]:
    """Return the weights of tokens of a byte that the student samples with certainty."""
    ends = list(range(1, len(nats) + 1))
    config = ImportanceConfig(least=least, discount=discount)
    return weights_of((ends, [0.0] * len(ends)), (ends, list(nats)), config)


def test_the_first_wrong_token_has_the_full_weight_and_those_behind_it_the_least() -> None:
    assert _sums([0, 0, -5, 0, 0], 0.1, 1.0) == pytest.approx([1, 1, 1, 0.1, 0.1])
    forgotten = _sums([0, 0, -5, *[0] * 40], 0.1, 0.9)
    assert forgotten[3] == pytest.approx(0.1)
    assert forgotten == pytest.approx(
        [1, 1, 1, *(max(0.1, np.exp(-5 * 0.9**n)) for n in range(40))]
    )
    assert forgotten[-1] > 0.9


def test_text_that_the_teacher_excludes_has_the_least_weight() -> None:
    assert _sums([0, -np.inf, 0, 0], 0.2, 1.0) == pytest.approx([1, 1, 0.2, 0.2])


def test_reference_completions_and_a_least_weight_of_one_have_no_weights() -> None:
    written = rollout("digit", ids_of("digit", "12 + 30 = 42"), teachers={"code": 1.0})
    written = replace(written, sampled_logprobs=np.zeros(len(written.completion)))
    [score] = example(written).scores
    strict, ones = ImportanceConfig(least=0.01), [1.0] * len(written.completion)
    assert importance_weights(written, score, strict, temperature=1).min() < 1
    assert importance_weights(written, score, UNWEIGHTED, temperature=1).tolist() == ones
    reference_completion = replace(written, sampled_logprobs=None)
    assert importance_weights(reference_completion, score, strict, temperature=1).tolist() == ones
