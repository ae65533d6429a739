"""Weights & Biases and trackio, where asked for: the journal's numbers, shown by somebody else.

Both are imported only then, and speak the same way: ``init``, ``log``, ``finish``.
"""

import uuid
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mopd_protocol.runtime.atomic_file import replacing
from mopd_trainer.config.extras import TRACKERS
from mopd_trainer.config.run import RunConfig

_RUN_ID = "tracker_run_id"


class Tracker:
    """One service's run, which a resumed run goes on with.

    A step that is done again after a kill is logged again: W&B keeps the first of the two, trackio
    shows both. The journal and TensorBoard are the ones that forget it.
    """

    def __init__(self, name: str, config: RunConfig) -> None:
        self._service: Any = import_module(name)
        run_id = _run_id(config.output_dir)
        given: dict[str, Any] = {
            "project": config.logging.project,
            "config": config.model_dump(mode="json"),
            "resume": "allow",
        }
        if name == "wandb":
            given |= {"name": config.exp_name, "id": run_id, "dir": str(config.output_dir)}
        else:  # which knows a run by its name
            given |= {"name": f"{config.exp_name}-{run_id}"}
        self._service.init(**given)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A step's numbers; steps count from 1."""
        self._service.log(dict(values), step=step)

    def close(self) -> None:
        """Everything that was logged has been handed over when this returns."""
        self._service.finish()


def trackers_of(config: RunConfig) -> list[Tracker]:
    """Those that are asked for, with their runs begun or gone on with."""
    return [Tracker(name, config) for name in TRACKERS if getattr(config.logging, name)]


def _run_id(folder: Path) -> str:
    """Made when a run begins, and kept with it."""
    path = folder / _RUN_ID
    if not path.exists():
        with replacing(path, durable=True) as temporary:
            temporary.write_text(uuid.uuid4().hex[:16])
    return path.read_text()
