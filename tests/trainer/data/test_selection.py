"""Selected tokens: the largest ones, and what teachers score of a completion."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Rollout
from mopd_trainer.config.settings import LossAverage
from mopd_trainer.config.tokens import TokensConfig
from mopd_trainer.data.averaging import sample_weights
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.packing import micro_batch
from mopd_trainer.data.selection import TokenSelection, divergences, first_tokens, largest
from tests.trainer.scored_examples import example
from tests.trainer.students import ids_of, rollout, table

TEXT = "1234+67=1301"  # with its end 13 tokens of the student


def sampled(teacher: str, entropies: list[float] | None = None) -> Rollout:
    ids = ids_of("digit", TEXT, "<|end|>")
    value = rollout("digit", ids, teachers={teacher: 1.0})
    drawn = np.random.default_rng(0).normal(-2, 1, len(ids)).astype(np.float32)
    kept = None if entropies is None else np.array(entropies[: len(ids)])
    return replace(value, sampled_logprobs=drawn, entropies=kept)


def selected(config: TokensConfig, value: Rollout) -> TrainingExample:
    """Return the example with made-up scores of what is sent."""
    selection = TokenSelection(table("digit"), config)
    scored = example(selection.sent(value))
    scores = tuple(selection.selected(value, score) for score in scored.scores)
    return TrainingExample(value, scores)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), max_size=12), st.floats(0.01, 1))
def test_the_largest_values_are_selected(values: list[float], share: float) -> None:
    mask = largest(np.array(values), share)
    ranked = sorted(range(len(values)), key=lambda at: (-values[at], at))
    count = math.ceil(round(share * len(values), 9))
    assert np.flatnonzero(mask).tolist() == sorted(ranked[:count])


@pytest.mark.parametrize("teacher", ["math", "code"])
def test_the_first_tokens_are_sent_without_an_end(teacher: str) -> None:
    value = sampled(teacher)
    item = selected(TokensConfig(first=5), value)
    [score] = item.scores
    request = score.teacher_input.request
    assert not request.finished
    assert score.teacher_input.completion.text.decode() == TEXT[:5]
    assert score.selected is not None
    assert score.selected.tolist() == [True] * 5
    part = micro_batch([item]).teachers[teacher]
    assert (part.slot_weights > 0).tolist() == [True] * 5 + [False] * 8
    [pair] = part.comparisons
    assert pair.sampled_logprobs is not None
    assert len(pair.sampled_logprobs) == len(pair.student) == 5
    complete = selected(TokensConfig(first=13), value)
    assert complete.scores[0].teacher_input.request.finished


def test_entropies_select_tokens_and_the_end_of_what_is_sent() -> None:
    entropies = [0, 9, 8, 1, 7, 2, 3, 4, 6, 5, 1, 1, 1.0]
    value = sampled("math", entropies)
    [score] = selected(TokensConfig(share=0.25), value).scores
    assert score.selected is not None
    assert np.flatnonzero(score.selected).tolist() == [1, 2, 4, 8]
    assert len(score.teacher_input.completion) == 9
    [score] = selected(TokensConfig(share=0.5, first=6), value).scores
    assert score.selected is not None
    assert np.flatnonzero(score.selected).tolist() == [1, 2, 4]
    with pytest.raises(DataError) as caught:
        selected(TokensConfig(share=0.5), sampled("math"))
    assert caught.value.key == "tokens.by"


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=13, max_size=13))
def test_the_beginning_with_a_share_of_the_entropy_is_sent(entropies: list[float]) -> None:
    config = TokensConfig(share=0.5, by="prefix_entropy")
    [score] = selected(config, sampled("math", entropies)).scores
    tokens = len(score.teacher_input.completion)
    assert score.selected is not None
    assert score.selected.tolist() == [True] * tokens
    assert sum(entropies[:tokens]) >= sum(entropies) / 2
    assert tokens == 1 or sum(entropies[: tokens - 1]) < sum(entropies) / 2


@pytest.mark.parametrize("teacher", ["math", "code"])
def test_divergences_select_spans_that_differ_most(teacher: str) -> None:
    value = sampled(teacher)
    [score] = example(value).scores
    spans, expected = score.alignment, np.zeros(len(value.completion))
    assert value.sampled_logprobs is not None
    for number in range(len(spans)):
        student_tokens = slice(spans.student_starts[number], spans.student_ends[number])
        teacher_tokens = slice(spans.teacher_starts[number], spans.teacher_ends[number])
        student = value.sampled_logprobs[student_tokens]
        difference = student.sum() - score.score.logprobs[teacher_tokens].sum()
        expected[student_tokens] = abs(difference) / len(student)
    np.testing.assert_allclose(divergences(value, score, 1.0), expected, rtol=1e-5, atol=1e-6)
    [chosen] = selected(TokensConfig(share=0.5, by="divergence"), value).scores
    assert chosen.selected is not None
    assert chosen.selected.sum() == 7
    assert len(chosen.teacher_input.completion) == 13
    assert expected[chosen.selected].min() >= expected[~chosen.selected].max() - 1e-5


@pytest.mark.parametrize("average", ["tokens", "samples", "teachers"])
def test_averages_divide_by_the_selected_tokens(average: LossAverage) -> None:
    items = [selected(TokensConfig(first=5), sampled("math")), example(sampled("code"))]
    weights = sample_weights(items, average)
    tokens = sum(len(item.rollout.completion) for item in items)
    total = weights[0].teachers["math"] * 5 + weights[1].teachers["code"] * 13
    assert total == pytest.approx(tokens)
    if average == "tokens":
        assert weights[0].teachers["math"] == weights[1].teachers["code"]


def test_a_beginning_has_no_end() -> None:
    value = sampled("math", [1.0] * 13)
    beginning = first_tokens(value, 4, table("digit"))
    assert beginning.finish_reason == "length"
    assert beginning.entropies is not None
    assert len(beginning.entropies) == len(beginning.completion) == 4
    assert first_tokens(value, 13, table("digit")) is value
