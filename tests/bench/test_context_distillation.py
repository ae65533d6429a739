"""The benchmark of context distillation: prompts with and without examples, and a short run."""

import json
from pathlib import Path
from random import Random

import pytest

from bench.context_distillation import form_of, main, query, with_examples
from bench.tasks.exercises import Dates


def test_examples_show_the_form_and_only_the_teacher_has_them() -> None:
    known = Dates().training(0)[:50]
    exercise = Dates().held_out()[0]
    for form, separator in (("dates", ", "), ("iso", "-"), ("slashes", "/")):
        completion = form_of(exercise, form).completion
        assert completion.count(separator) == (1 if form == "dates" else 2)
        *examples, last = with_examples(exercise, known, form, Random(1)).splitlines()
        assert last == query(exercise)
        assert completion not in last
        assert len(examples) == 2
        assert all(separator in line.partition(" -> ")[2] for line in examples)


@pytest.mark.slow
def test_quick_run_measures_all_accuracies(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    main(["--quick", "--runs", str(tmp_path / "runs"), "--json", str(output)])
    (measured,) = json.loads(output.read_text()).values()
    for key in ("accuracy", "sampled_accuracy"):
        for side in ("before", "after", "teacher"):
            assert 0 <= measured[f"{key}_{side}"] <= 1
    assert 0 <= measured["copied_share"] <= 1
