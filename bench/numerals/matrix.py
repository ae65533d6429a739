"""All runs of a comparison: models first, then every loss and seed, each in a separate process.

A finished run is saved to a file, so that an interrupted comparison can be resumed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.numerals.distillation import Run, distil
from bench.numerals.material import Role, model_folder, train_model
from bench.numerals.pairs import Side
from mopd.demo.work_processes import Report, Work, run_in_processes
from mopd_protocol import replacing

Result = dict[str, Any]


@dataclass(frozen=True)
class Folders:
    """Folders of a comparison's models and results."""

    root: Path

    @property
    def models(self) -> Path:
        """Teachers and warm students, which later comparisons use again."""
        return self.root / "models"

    def result(self, run: Run) -> Path:
        """The file of a finished run."""
        return self.root / "results" / f"{run.name}.json"


def finished(run: Run, folders: Folders) -> Result | None:
    """Load the result of a run with exactly these settings, or return `None`."""
    path = folders.result(run)
    if not path.is_file():
        return None
    result: Result = json.loads(path.read_text())
    return result if result["settings"] == run.settings else None


def run_all(
    runs: Sequence[Run], folders: Folders, console: Console, processes: int
) -> list[Result]:
    """Run what is not finished; return the results in the order of ``runs``."""
    missing = [run for run in runs if finished(run, folders) is None]
    if missing:
        console.print(f"{len(runs) - len(missing)} of {len(runs)} runs are finished already")
        train_models(missing, folders, console, processes)
        works = [Work(run.name, run.pair.steps, _distil, (run, folders)) for run in missing]
        run_in_processes(works, console, processes)
    return [json.loads(folders.result(run).read_text()) for run in runs]


def train_models(runs: Sequence[Run], folders: Folders, console: Console, processes: int) -> None:
    """Train the teachers and warm students that the runs need and that are missing."""
    missing = _missing_models(runs, folders)
    if missing:
        works = [
            Work(folder.name, model[0].steps, _train, (model, folders))
            for folder, model in missing.items()
        ]
        run_in_processes(works, console, processes)


def _missing_models(runs: Sequence[Run], folders: Folders) -> dict[Path, tuple[Side, Role, int]]:
    """Return the models to train before the runs, by folder."""
    models = [model for run in runs for model in run.models]
    needed = {model_folder(*model, folders.models): model for model in models}
    return {folder: model for folder, model in needed.items() if not folder.is_dir()}


def _train(report: Report, model: tuple[Side, Role, int], at: Folders) -> None:
    train_model(*model, at.models, lambda done, steps: report(done, ""))


def _distil(report: Report, run: Run, at: Folders) -> None:
    result = distil(
        run,
        at.models,
        lambda done, loss, right: report(done, f"loss {loss:.3f}  right {right:.0%}"),
    )
    with replacing(at.result(run)) as unfinished:
        unfinished.write_text(json.dumps(result, indent=1) + "\n")
