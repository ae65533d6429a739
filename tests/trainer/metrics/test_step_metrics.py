"""Metrics of a step, compared with plain Python."""

import math

import numpy as np
import pytest
import torch

from mopd_client.transport.counters import Counters
from mopd_losses.core.loss import LossOutput
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.metrics.step_metrics import LossMeasurements, rollout_metrics, teacher_metrics
from tests.trainer.scored_examples import example
from tests.trainer.students import ids_of, rollout

NAMES = ("math", "code", "idle")


def examples() -> list[TrainingExample]:
    written = [
        (("12 + 30", "<|end|>"), {"math": 1.0}),
        (("def add", "<|pad|>", "(a)"), {"code": 1.0}),
        (("7 的", b"\xff", "ab"), {"math": 1.0, "code": 3.0}),
    ]
    return [
        example(rollout("digit", ids_of("digit", *pieces), teachers=teachers, index=index))
        for index, (pieces, teachers) in enumerate(written)
    ]


def measured() -> dict[str, float]:
    losses = {"math": LossMeasurements(), "code": LossMeasurements()}
    losses["math"].add(LossOutput(torch.tensor([1.0, 2.0]), torch.ones(2)), torch.tensor([1, 0.5]))
    losses["math"].add(LossOutput(torch.tensor([0.5]), torch.zeros(1)), torch.tensor([0.25]))
    losses["code"].add(LossOutput(torch.tensor([4.0]), torch.tensor([0.5])), torch.ones(1))
    counters = {name: Counters() for name in NAMES}
    counters["math"] = Counters(2, 3, 0, 11, [1.0, 2.0, 9.0], cache_misses=4, fallbacks=5, waits=6)
    return teacher_metrics(examples(), losses, counters, dict.fromkeys(NAMES, 400))


def tokens(*chosen: int) -> int:
    return sum(len(examples()[at].rollout.completion) for at in chosen)


def test_losses_are_per_token_and_per_byte_of_the_teachers_own_samples() -> None:
    actual = measured()
    assert actual["teacher/math/tokens"] == tokens(0, 2)
    assert actual["teacher/math/loss_per_token"] == pytest.approx(3.5 / tokens(0, 2))
    assert actual["teacher/code/loss_per_token"] == pytest.approx(4.0 / tokens(1, 2))
    assert actual["teacher/math/loss"] == pytest.approx(3.5 / 2)
    assert actual["teacher/code/loss"] == pytest.approx(4.0 / 0.5)
    assert actual["teacher/code/compared_share"] == pytest.approx(0.5 / tokens(1, 2))
    assert actual["teacher/math/importance_weight_mean"] == pytest.approx(1.75 / tokens(0, 2))
    spelled = len(b"12 + 30") + len("7 的".encode()) + 3
    assert actual["teacher/math/loss_per_byte"] == pytest.approx(3.5 / spelled)


def test_token_fractions_are_shares_that_sum_to_one() -> None:
    actual = measured()
    fractions = {name: actual[f"teacher/{name}/token_fraction"] for name in NAMES}
    assert math.fsum(fractions.values()) == pytest.approx(1.0)
    assert fractions["math"] == pytest.approx((tokens(0) + 0.25 * tokens(2)) / tokens(0, 1, 2))
    assert fractions["idle"] == 0


def test_the_alignment_ratio_is_the_share_of_bytes_in_spans() -> None:
    actual = measured()
    assert actual["teacher/math/alignment_ratio"] == 1  # it reads the student's ids
    # All of the second (its control token as eight bytes of text); the third up to the 0xff.
    whole, cut = len("def add<|pad|>(a)"), len("7 的".encode())
    assert actual["teacher/code/alignment_ratio"] == pytest.approx(
        (whole + cut) / (whole + cut + 3)
    )
    assert actual["teacher/code/control_tokens_as_text"] == 1
    assert actual["teacher/code/invalid_utf8_bytes"] == 3


def test_a_teacher_without_a_sample_was_not_measured() -> None:
    actual = measured()
    for key in ("loss_per_token", "loss_per_byte", "alignment_ratio", "score_seconds_p50"):
        assert math.isnan(actual[f"teacher/idle/{key}"]), key
    assert actual["teacher/idle/tokens"] == 0


def test_counters_are_reported() -> None:
    actual = measured()
    assert actual["teacher/math/retries"] == 3
    assert actual["teacher/math/scored_tokens"] == 11
    assert [actual[f"teacher/math/{n}"] for n in ("cache_misses", "fallbacks", "waits")] == [
        4,
        5,
        6,
    ]
    assert actual["teacher/code/breaker_openings"] == actual["teacher/code/cache_hits"] == 0
    assert actual["teacher/math/score_seconds_p50"] == 2.0
    assert actual["teacher/math/score_seconds_p95"] == pytest.approx(8.3)


def test_several_replicas_are_compared() -> None:
    counters = Counters(rejected_replicas=1)
    counters.replica("http://a").tokens = 30
    for count, expected in ((1, None), (2, 1.5)):
        metrics = teacher_metrics(examples(), {}, {"math": counters}, {"math": 400})
        assert metrics["teacher/math/rejected_replicas"] == 1
        assert metrics.get("teacher/math/busiest_replica") == expected
        assert metrics.get("teacher/math/replicas") == (None if count == 1 else 2)
        counters.replica("http://b").tokens = 10


def test_masses_are_means_over_all_micro_batches() -> None:
    generator = np.random.default_rng(0)
    parts = [generator.uniform(size=size).astype(np.float32) for size in (30, 1, 70)]
    loss = LossMeasurements()
    for part in parts:
        vectors = {"teacher_mass": torch.tensor(part), "student_mass": torch.tensor(part / 2)}
        zeros = torch.zeros(len(part), requires_grad=True)
        loss.add(LossOutput(zeros, zeros.detach(), vectors), zeros.detach())
    actual = loss.metrics()
    everything = math.fsum(float(value) for part in parts for value in part)
    assert actual["teacher_mass_mean"] == pytest.approx(everything / 101)
    assert actual["student_mass_mean"] == pytest.approx(everything / 202)
    assert loss.nats == 0


def test_rollout_metrics_by_length_end_and_age() -> None:
    actual = rollout_metrics(examples(), step=3)
    assert actual["rollout/samples"] == 3
    assert actual["rollout/completion_tokens_mean"] == pytest.approx(tokens(0, 1, 2) / 3)
    assert actual["rollout/finished_share"] == pytest.approx(1 / 3)
    assert actual["rollout/truncated_share"] == pytest.approx(2 / 3)
    assert actual["rollout/completion_tokens_max"] == max(tokens(0), tokens(1), tokens(2))
    assert actual["rollout/entropy"] == pytest.approx(1.0)  # all sampled logprobs are -1
    assert actual["staleness/mean"] == actual["staleness/max"] == 3
