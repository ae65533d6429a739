"""Bounds of the entropy, and the estimate of the KL divergence, against full distributions."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_protocol.samples import TeacherScore
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.data.examples import AlignedScore, TrainingExample
from mopd_trainer.data.teacher_input import text_view
from mopd_trainer.metrics.distributions import teacher_distribution_metrics
from tests.trainer.students import encoder, encoder_without_bytes, ids_of, rollout, table

IDS = ids_of("digit", "1")


def scored(
    teacher: np.ndarray, *, k: int, token: int = 0, logprob: float = -1.0
) -> tuple[TrainingExample, AlignedScore]:
    """Return a completion of one token, with the teacher's top-k of a distribution."""
    order = np.argsort(-teacher, kind="stable")[:k]
    with np.errstate(divide="ignore"):
        topk = TopKLogprobs(
            ids=order[None],
            logprobs=np.log(teacher[order])[None],
            token_logprobs=np.log(teacher[[token]]),
            tail_logprobs=np.log(np.maximum(1 - teacher[order].sum(), 0))[None],
        )
    sample = replace(rollout("digit", IDS), sampled_logprobs=np.array([logprob]))
    score = TeacherScore("manifest", sample.completion, topk)
    view = text_view(sample, table("digit"), encoder("digit"))
    example: Any = cast(Any, type("Example", (), {"rollout": sample}))
    return example, cast(Any, type("Aligned", (), {"score": score, "teacher_input": view}))


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=30), st.data())
def test_the_entropy_is_between_its_bounds(weights: list[float], data: st.DataObject) -> None:
    shares = np.array(weights) / sum(weights)
    k = data.draw(st.integers(1, len(shares)))
    metrics = teacher_distribution_metrics([scored(shares, k=k)], vocabulary=len(shares))
    entropy = -float((shares * np.log(shares)).sum())
    assert metrics["entropy_low"] <= entropy + 1e-5
    assert metrics["entropy_high"] >= entropy - 1e-5
    if k == len(shares):
        assert metrics["entropy_low"] == pytest.approx(entropy, abs=1e-4)
        assert metrics["entropy_high"] == pytest.approx(entropy, abs=1e-4)


@pytest.mark.parametrize("temperature", [1, 0.6])
def test_the_estimate_is_the_divergence_in_expectation(temperature: float) -> None:
    student, teacher = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.7])
    estimates = [
        teacher_distribution_metrics(
            [scored(teacher, k=3, token=token, logprob=float(np.log(student[token])))],
            vocabulary=3,
            temperature=temperature,
        )["reverse_kl_estimate"]
        for token in range(3)
    ]
    powers = teacher ** (1 / temperature)
    expected = float((student * np.log(student / (powers / powers.sum()))).sum())
    assert float(student @ estimates) == pytest.approx(expected, rel=1e-5)


def test_tokens_that_a_teacher_could_not_be_sent_do_not_count() -> None:
    sample = replace(
        rollout("digit", [*IDS, *ids_of("digit", b"\xff", "2")]),
        sampled_logprobs=np.array([-0.5, -3.0, -7.0]),
    )
    view = text_view(sample, table("digit"), encoder_without_bytes("digit"))
    assert view.request.completion == "1"
    _, aligned = scored(np.array([0.25, 0.75]), k=2)
    example: Any = type("Example", (), {"rollout": sample})
    cut: Any = type("Aligned", (), {"score": aligned.score, "teacher_input": view})
    metrics = teacher_distribution_metrics([(example, cut)], vocabulary=2)
    assert metrics["reverse_kl_estimate"] == pytest.approx(-0.5 - np.log(0.25))


@given(st.lists(st.floats(0, 0.4), min_size=101, max_size=101))
def test_the_coverage_is_the_probability_of_the_returned_ids(rests: list[float]) -> None:
    samples = [scored(np.array([1 - rest, rest]), k=1) for rest in rests]
    metrics = teacher_distribution_metrics(samples, vocabulary=2)
    assert metrics["topk_mass_mean"] == pytest.approx(1 - sum(rests) / 101, abs=1e-6)
    # The first percentile of 101 values is the second smallest.
    assert metrics["topk_mass_p1"] == pytest.approx(1 - sorted(rests)[-2], abs=1e-6)


def test_the_implausible_share_is_of_tokens_far_below_the_likeliest() -> None:
    teacher = np.array([0.95, 0.03, 0.0195, 0.0005])
    drawn = [scored(teacher, k=2, token=token) for token in (0, 1, 2, 3, 3)]
    metrics = teacher_distribution_metrics(drawn, vocabulary=4)
    assert metrics["implausible_share"] == pytest.approx(2 / 5)
