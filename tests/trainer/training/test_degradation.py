"""Warnings about a degrading student, on planted courses of the metrics."""

import logging
import math
from collections.abc import Sequence

import pytest

from mopd_trainer.config.degradation import DegradationConfig
from mopd_trainer.training.degradation import (
    END,
    ENTROPY,
    INVALID,
    LENGTH,
    TEACHER_ENTROPY,
    TRUNCATED,
    DegradationMonitor,
    Finding,
)

SHARE = "compared_share"
OF_TEACHER = "teacher/math/compared_share"
DIVERGES = "teacher/math/reverse_kl_estimate"
Course = dict[str, tuple[float, float]]

#: Metric -> its value before and after the fault.
FAULTS: dict[str, tuple[str, bool, Course]] = {
    "the compared share falls": (SHARE, True, {SHARE: (0.98, 0.42)}),
    "the compared share falls a little": (SHARE, False, {SHARE: (0.98, 0.75)}),
    "the compared share of a teacher falls": (
        OF_TEACHER,
        True,
        {SHARE: (0.9, 0.8), OF_TEACHER: (0.5, 0.1), "teacher/code/compared_share": (1, 1)},
    ),
    "the compared share of a control arm falls": (
        OF_TEACHER,
        True,
        {
            SHARE: (0.9, 0.8),
            OF_TEACHER: (0.5, 0.1),
            "teacher/code/compared_share": (1, 1),
            "teacher/math/control": (1, 1),
        },
    ),
    "invalid bytes": (INVALID, True, {INVALID: (0.0, 0.3), SHARE: (1, 0.9)}),
    "samples become unlikely under a teacher": (
        DIVERGES,
        True,
        {DIVERGES: (4.2, 14.7), "teacher/code/reverse_kl_estimate": (4, 2), SHARE: (1, 1)},
    ),
    "samples become less likely under a teacher": (DIVERGES, False, {DIVERGES: (4.2, 7.6)}),
    "samples become less likely under a teacher that was close": (
        DIVERGES,
        False,
        {DIVERGES: (-0.01, 0.5)},
    ),
    "some invalid bytes": (INVALID, False, {INVALID: (0.01, 0.05)}),
    "the student ends early": (LENGTH, False, {LENGTH: (20, 8), END: (0.1, 4)}),
    "the student ends at once": (LENGTH, True, {LENGTH: (20, 1), END: (0.1, 4)}),
    "the student is certain of one text": (
        ENTROPY,
        False,
        {ENTROPY: (0.8, 0.01), TEACHER_ENTROPY: (0.6, 0.5)},
    ),
}

SOUND: dict[str, Course] = {
    "a random student learns to end": {LENGTH: (32, 2), END: (7, 0.01)},
    "a student that ends at once learns to continue": {LENGTH: (1, 32), END: (9, math.nan)},
    "a sure teacher makes the student sure": {
        ENTROPY: (3, 0.001),
        TEACHER_ENTROPY: (2, 0.001),
    },
    "a random student learns to spell": {INVALID: (0.6, 0), SHARE: (0.3, 1)},
    "samples become likely, and then a little less": {DIVERGES: (0.01, 0.24)},
    "a control arm teaches nothing": {DIVERGES: (2, 9), "teacher/math/control": (1, 1)},
    "reference answers": {SHARE: (1, 1), INVALID: (math.nan, math.nan)},
}


def findings(
    course: Course, *, steps: int = 40, window: int = 5, past: int = 0
) -> list[tuple[int, Finding]]:
    """Observe a course that changes linearly from step 11 to 30; return findings by step."""
    rows = [
        {
            key: before + (after - before) * min(max((step - 10) / 20, 0), 1)
            for key, (before, after) in course.items()
        }
        for step in range(1, steps + 1)
    ]
    config = DegradationConfig(window=window)
    monitor = DegradationMonitor(config, enumerate(rows[:past], 1))
    return [
        (step, finding)
        for step in range(past + 1, steps + 1)
        for finding in monitor.observe(step, rows[step - 1])
    ]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_once_with_its_numbers(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    metric, is_grave, course = FAULTS[fault]
    with caplog.at_level(logging.WARNING):
        (step, first), *others = findings(course)
    grave = [finding.is_grave for _, finding in others]
    assert {finding.metric for _, finding in [(step, first), *others]} == {metric}
    assert (first.is_grave or grave == [True]) if is_grave else not (first.is_grave or grave)
    assert len(caplog.messages) == 1
    assert f"step {step}:" in first.message
    assert f"{course[metric][0]:.3g} (mean of steps" in first.message
    assert step > 10
    assert first.sound_steps < step - 5, "the checkpoint is from before the window"


@pytest.mark.parametrize("course", SOUND)
def test_a_sound_run_has_no_warning(course: str) -> None:
    assert findings(SOUND[course]) == []


def test_the_first_window_has_nothing_to_compare_with() -> None:
    assert findings({SHARE: (0.9, 0.0)}, steps=14, window=20) == []


def test_a_student_may_degrade_within_the_first_window() -> None:
    [(step, finding)] = findings({DIVERGES: (4, 5.5)}, steps=50, window=20)
    assert step > 20
    assert "4 (mean of steps 1 to 10)" in finding.message


def test_the_first_complete_window_may_be_degraded() -> None:
    """Nothing before it was found to be sound."""
    monitor = DegradationMonitor(DegradationConfig(window=10))
    rows = [{DIVERGES: 4.0}] * 5 + [{DIVERGES: 14.0}] * 5
    *before, [finding] = [monitor.observe(step, row) for step, row in enumerate(rows, 1)]
    assert before == [[]] * 9
    assert (finding.metric, finding.sound_steps) == (DIVERGES, 0)


@pytest.mark.parametrize("past", [0, 12, 25])
def test_a_resumed_run_remembers_its_best(past: int) -> None:
    """A run that is resumed after it became grave ends again; other warnings are not repeated."""
    course = FAULTS["the compared share falls"][2]
    whole = findings(course)
    resumed = findings(course, past=past)
    assert [(s, f) for s, f in whole if s > past] == resumed
    (step, grave) = findings(course, past=35)[0]
    assert (step, grave.is_grave, grave.sound_steps) == (36, True, whole[-1][1].sound_steps)


def test_noise_within_the_thresholds_is_no_fault() -> None:
    values: Sequence[float] = [0.9, 0.75, 1.0, 0.85]
    monitor = DegradationMonitor(DegradationConfig(window=4))
    rows = [{SHARE: values[step % 4], INVALID: step % 2 * 0.01} for step in range(80)]
    assert not [f for step, row in enumerate(rows, 1) for f in monitor.observe(step, row)]


def _advice(course: Course, *, recommended: bool) -> str:
    monitor = DegradationMonitor(DegradationConfig(window=5), recommended=recommended)
    for step in range(1, 41):
        share = min(max((step - 10) / 20, 0), 1)
        row = {key: before + (after - before) * share for key, (before, after) in course.items()}
        for finding in monitor.observe(step, row):
            if finding.is_grave:
                return finding.advice
    raise AssertionError


def test_advice_is_possible() -> None:
    course: Course = {DIVERGES: (4.2, 14.7)}
    assert "loss 'auto'" in _advice(course, recommended=False)
    assert "'auto'" not in _advice(course, recommended=True)
    assert "student.learning_rate" in _advice(course, recommended=True)


@pytest.mark.parametrize("recommended", [False, True])
def test_samples_without_an_end_are_the_advice_where_they_became_many(recommended: bool) -> None:
    course: Course = {DIVERGES: (4.2, 14.7), TRUNCATED: (0.1, 0.94)}
    advice = _advice(course, recommended=recommended)
    assert "rollout.max_new_tokens" in advice
    assert "'auto'" not in advice
    always: Course = {DIVERGES: (4.2, 14.7), TRUNCATED: (0.9, 0.94)}
    assert "rollout.max_new_tokens" not in _advice(always, recommended=recommended)
