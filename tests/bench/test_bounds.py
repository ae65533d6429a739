"""Tests of the comparison with and without bounds: finished runs, and a quick run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.bounds import main
from bench.numerals.distillation import Run
from bench.numerals.matrix import Folders
from bench.numerals.pairs import WITHOUT_BOUNDS, loss_settings, shortened
from bench.tasks.pairs import PAIRS


def test_the_losses_differ_in_their_bounds_only() -> None:
    settings = [loss_settings(name).model_dump() for name in ("prefix_kl", WITHOUT_BOUNDS)]
    assert settings[0] == settings[1] | {"bounds": True}
    assert not settings[1]["bounds"]


def finish(folder: Path, pair: str, loss: str, seed: int, accuracies: list[float]) -> None:
    """Write the result of a run."""
    run = Run(shortened(PAIRS[pair], 4, None), loss, seed, len(accuracies) - 1)
    curve = [{"step": 2 * n, "accuracy": share, "loss": 0.1} for n, share in enumerate(accuracies)]
    result: dict[str, Any] = {"settings": run.settings, "curve": curve}
    path = Folders(folder).result(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result | {"processor_seconds": {"total": 3.0}}))


def test_finished_runs_are_shown_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(tmp_path, "dates", "prefix_kl", 0, [0.1, 0.5, 0.9])
    finish(tmp_path, "dates", "prefix_kl", 1, [0.2, 0.6, 1.0])
    finish(tmp_path, "dates", WITHOUT_BOUNDS, 0, [0.1, 0.3])  # was stopped, at other evaluations
    finish(tmp_path, "hindi_dates", WITHOUT_BOUNDS, 0, [0.1, 0.3, 0.4])
    common = ["--report", "--steps", "4", "--evaluations", "2", "--runs", str(tmp_path)]
    main([*common, "--json", f"{tmp_path}/figures"])
    figures = json.loads((tmp_path / "figures").read_text())
    assert {name: set(pair) for name, pair in figures.items()} == {
        "dates": {"on"},
        "hindi_dates": {"off"},
    }
    accuracy = figures["dates"]["on"]["accuracy"]["4"]
    assert accuracy["mean"] == pytest.approx(0.95)
    assert (accuracy["lowest"], accuracy["highest"], accuracy["seeds"]) == (0.9, 1.0, 2)
    assert "95.0 (90–100)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_quick_comparison_is_not_made_again(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    quick = ["--steps", "2", "--model-steps", "2", "--evaluations", "1", "--runs", str(tmp_path)]
    arguments = ["--tasks", "hindi", "--seeds", "1", *quick]
    main([*arguments, "--bounds", "on"])
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    main([*arguments, "--json", f"{tmp_path}/figures"])
    assert set(json.loads((tmp_path / "figures").read_text())["hindi_dates"]) == {"on", "off"}
    assert len(first) == 1
    assert all(path.stat().st_mtime_ns == time for path, time in first.items())
