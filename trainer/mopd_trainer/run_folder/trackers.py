"""Weights & Biases and trackio: metrics and completions of a run in an experiment tracker.

Both have the same interface (``init``, ``log``, ``finish``, ``Table``); imported only if enabled.
"""

import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from mopd_protocol.runtime.atomic_file import replacing
from mopd_trainer.config.extras import TRACKERS
from mopd_trainer.config.run import RunConfig

_RUN_ID = "tracker_run_id"
_COLUMNS = ("step", "source", "prompt", "completion", "teacher", "nats_per_token")


class Tracker:
    """A run of a tracker; a resumed run continues it.

    A step that is repeated after a kill is logged again: W&B keeps the first values, trackio shows
    both. Only the journal and TensorBoard remove the first values.
    """

    def __init__(self, name: str, config: RunConfig) -> None:
        self._service: Any = import_module(name)
        run_id = _run_id(config.output_dir)
        arguments: dict[str, Any] = {
            "project": config.logging.project,
            "config": config.model_dump(mode="json"),
            "resume": "allow",
        }
        if name == "wandb":
            arguments |= {"name": config.exp_name, "id": run_id, "dir": str(config.output_dir)}
        else:  # trackio identifies a run by its name
            arguments |= {"name": f"{config.exp_name}-{run_id}"}
        self._service.init(**arguments)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step (from 1)."""
        self._service.log(dict(values), step=step)

    def log_completions(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Log lines of ``logged_completion`` as a table, a row per completion and teacher."""
        step = lines[0]["step"]
        rows = [
            [step, line["source"], line["prompt"][-1]["content"], line["completion"], name, nats]
            for line in lines
            for name, nats in _nats_per_token(line).items()
        ]
        table = self._service.Table(columns=list(_COLUMNS), data=rows)
        self._service.log({"completions": table}, step=step)

    def close(self) -> None:
        """Finish the run; returns when all metrics are uploaded."""
        self._service.finish()


def trackers_of(config: RunConfig) -> list[Tracker]:
    """Start or continue the runs of all enabled trackers."""
    return [Tracker(name, config) for name in TRACKERS if getattr(config.logging, name)]


def _nats_per_token(line: Mapping[str, Any]) -> dict[str, float | None]:
    """Return each teacher's mean loss of the compared tokens; None if there are none."""
    compared = {
        name: [each for each in line["nats"].get(name, ()) if each is not None]
        for name in line["teachers"] or {"": None}
    }
    return {name: fmean(nats) if nats else None for name, nats in compared.items()}


def _run_id(folder: Path) -> str:
    """Return the id in the run folder; create one for a new run."""
    path = folder / _RUN_ID
    if not path.exists():
        with replacing(path, durable=True) as temporary:
            temporary.write_text(uuid.uuid4().hex[:16])
    return path.read_text()
