"""The line of a step on the console."""

import math
from io import StringIO

from rich.console import Console

from mopd_trainer.reporting.progress import LEGEND, RunProgress, step_line

METRICS = {
    "loss": 0.594,
    "compared_share": 0.998,
    "tokens/trained": 220.0,
    "time/step": 0.29,
    "time/sample": 0.12,
    "time/wait": 0.04,
    "time/train": 0.09,
    "teacher/dates/loss": 0.53,
    "teacher/dates/reverse_kl_estimate": 4.169,
    "teacher/sums/loss": 0.72,
    "teacher/sums/reverse_kl_estimate": math.nan,
}


def test_a_step_has_the_loss_and_the_divergence_of_each_teacher() -> None:
    line = step_line(3, 100, METRICS)
    assert "(dates 0.5300, sums 0.7200)" in line
    assert "(dates 4.17)" in line
    assert "100%" in line


def test_a_divergence_that_was_not_measured_is_not_shown() -> None:
    metrics = METRICS | {"teacher/dates/reverse_kl_estimate": math.nan}
    assert "KL" not in step_line(3, 100, metrics)


def test_the_two_numbers_are_explained_once() -> None:
    output = StringIO()
    with RunProgress(Console(file=output, width=80), name="run", done=0, total=3) as progress:
        progress.advance(1, METRICS | {"teacher/dates/reverse_kl_estimate": math.nan}, show=True)
        assert LEGEND not in output.getvalue()
        progress.advance(2, METRICS, show=True)
        progress.advance(3, METRICS, show=True)
    lines = output.getvalue().splitlines()
    assert [line.startswith("step ") for line in lines] == [True, False, True, True]
    assert lines[1] == LEGEND


def test_a_step_without_samples_has_no_loss() -> None:
    line = step_line(3, 100, METRICS | {"tokens/trained": 0.0})
    assert "0.5300" not in line
    assert "skipped" in line
