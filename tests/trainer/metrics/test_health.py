"""Metrics that show a degrading student, compared with plain Python."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.metrics.health import health_metrics
from tests.trainer.scored_examples import example
from tests.trainer.students import ids_of, rollout


def examples() -> list[TrainingExample]:
    return [
        example(rollout("digit", ids_of("digit", "12 + 30", end), teachers={"code": 1.0}))
        for end in ("<|end|>", "4", b"\xff")
    ]


def test_dropped_samples_count_as_not_compared() -> None:
    dropped = {
        "dropped/total": 5.0,
        "dropped/code/nothing_aligned": 2.0,
        "dropped/code/refused": 3.0,
    }
    shares = {"compared_share": 0.8, "teacher/code/compared_share": 0.6, "loss": 1.0}
    actual = health_metrics(examples(), shares | dropped, temperature=1)
    assert actual["compared_share"] == pytest.approx(0.8 * 3 / 5)
    assert actual["teacher/code/compared_share"] == pytest.approx(0.6 * 3 / 5)
    assert "loss" not in actual
    assert health_metrics([], shares | dropped, temperature=1)["compared_share"] == 0
    assert health_metrics(examples(), shares, temperature=1)["compared_share"] == 0.8
    replayed = {"dropped/total": 3.0, "dropped/nothing_aligned": 3.0}
    assert health_metrics(examples(), shares | replayed, temperature=1)[
        "compared_share"
    ] == pytest.approx(0.4)


@pytest.mark.parametrize("temperature", [1, 0.5, 0])
def test_entropies_are_of_the_samples_and_of_the_teachers_on_them(temperature: float) -> None:
    chosen = examples()
    actual = health_metrics(chosen, {}, temperature=temperature)
    surprisal = -sum(float(e.rollout.sampled_logprobs.sum()) for e in chosen)  # type: ignore[union-attr]
    text_bytes = sum(len(e.rollout.completion.text) for e in chosen)
    assert actual["rollout/entropy_per_byte"] == pytest.approx(surprisal / text_bytes)
    assert actual["rollout/invalid_byte_share"] == pytest.approx(1 / text_bytes)
    entropy, scored_bytes = 0.0, 0
    for item in chosen:
        score = item.scores[0].score
        scored_bytes += len(score.completion.text)
        for row, tail in zip(score.topk.logprobs, score.topk.tail_logprobs, strict=True):
            masses = [*np.exp(row.astype(float)), math.exp(tail)]
            if temperature:
                powers = [mass ** (1 / temperature) for mass in masses]
                masses = [power / sum(powers) for power in powers]
                entropy -= sum(mass * math.log(mass) for mass in masses if mass)
    assert actual["rollout/teacher_entropy_per_byte"] == pytest.approx(entropy / scored_bytes)
    assert actual["rollout/teacher_end_surprisal"] == 1.0, "the one end has logprob -1"


def test_reference_answers_are_no_samples() -> None:
    reference = [
        TrainingExample(replace(e.rollout, sampled_logprobs=None), e.scores) for e in examples()
    ]
    assert all(math.isnan(value) for value in health_metrics(reference, {}, temperature=1).values())
