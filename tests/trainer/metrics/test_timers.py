"""Seconds by phase, when phases overlap."""

import math

from hypothesis import given
from hypothesis import strategies as st

from mopd_trainer.metrics.timers import Phase, StepTimer


class ManualClock:
    """A clock whose seconds a test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_teachers_are_waited_for_while_nothing_is_written() -> None:
    now = ManualClock()
    clock = StepTimer(now)
    now.seconds += 1  # no phase is active
    with clock.phase("score"), clock.phase("score"):
        with clock.phase("sample"):
            now.seconds += 3
        now.seconds += 1  # a wait
    with clock.phase("train"):
        now.seconds += 2
    assert clock.pop() == {
        "time/sample": 3.0,
        "time/score": 4.0,
        "time/wait": 1.0,
        "time/train": 2.0,
        "time/push": 0.0,
        "time/step": 7.0,
        "time/hidden_share": 0.75,
    }
    assert math.isnan(clock.pop()["time/hidden_share"])


def test_an_active_phase_is_split_between_two_readings() -> None:
    now = ManualClock()
    clock = StepTimer(now)
    with clock.phase("sample"):
        now.seconds += 2
        assert clock.pop()["time/sample"] == 2
        now.seconds += 5
    assert clock.pop()["time/sample"] == 5


PHASES = st.sampled_from(("sample", "score", "train"))


@given(st.lists(st.tuples(PHASES, st.integers(1, 9), st.integers(1, 9))))
def test_a_phase_lasts_as_long_as_the_union_of_its_spans(
    spans: list[tuple[Phase, int, int]],
) -> None:
    now = ManualClock()
    clock = StepTimer(now)
    phases = {at: clock.phase(name) for at, (name, _, _) in enumerate(spans)}
    covered: dict[str, set[int]] = {"sample": set(), "score": set(), "train": set()}
    for name, start, length in spans:
        covered[name] |= set(range(start, start + length))
    for second in range(20):
        for at, (_, start, length) in enumerate(spans):
            if second == start:
                phases[at].__enter__()
            if second == start + length:
                phases[at].__exit__(None, None, None)
        now.seconds += 1
    actual = clock.pop()
    for name, seconds in covered.items():
        assert actual[f"time/{name}"] == len(seconds)
    assert actual["time/wait"] == len(covered["score"] - covered["sample"])
