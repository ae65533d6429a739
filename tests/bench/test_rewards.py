"""The benchmark of rewards: a third of the teacher's months is wrong, and a short run."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from bench.rewards import ARMS, MistakenMonths, Months, is_mistaken, main


def test_a_third_of_the_months_is_taught_wrong() -> None:
    right, taught = Months().training(0), MistakenMonths().training(0)
    assert 0.3 < fmean(map(is_mistaken, right)) < 0.37
    for exercise in taught:
        month = int(exercise.prompt.split(".")[1])
        months = ["January", "February", "March", "April", "June", "July", "August", "September"]
        months += ["September", "October", "November", "December"]
        assert exercise.completion == months[month - 1]


@pytest.mark.slow
def test_quick_run_measures_all_arms(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    main(["--quick", "--runs", str(tmp_path / "runs"), "--json", str(output)])
    results = json.loads(output.read_text())
    assert [*results] == [*ARMS]
    for (run,) in results.values():
        assert [point["step"] for point in run["curve"]] == [0, 1, 2]
        assert all(0 <= point["all"] <= 1 for point in run["curve"])
