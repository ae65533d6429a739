"""Checkpoints: everything that a run needs to go on as if it had never stopped.

Random numbers, the data's order and the learning rate are functions of the seed and the step, so
weights, optimizer moments and the step's number are all the state there is. A checkpoint is
written under another name and renamed: what has the name is whole.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mopd_protocol.atomic_file import replacing_folder
from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.manifest import Manifest
from mopd_trainer.config import RunConfig
from mopd_trainer.journal import JOURNAL
from mopd_trainer.run_file import write_resolved
from mopd_trainer.student import Student

CHECKPOINTS = "checkpoints"
FINAL = "final"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: steps done, and the teachers that it was made with."""

    folder: Path
    step: int
    manifest_ids: dict[str, str]  # teacher name -> manifest id

    @property
    def model_folder(self) -> Path:
        """The student as an ordinary Hugging Face folder."""
        return self.folder / "model"

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads what a checkpoint is about, not its tensors.

        Raises:
            ConfigError: when there is no checkpoint in the folder.
        """
        try:
            state = json.loads((folder / "state.json").read_text())
            manifests = json.loads((folder / "manifests.json").read_text())
            ids = {name: manifest["manifest_id"] for name, manifest in manifests.items()}
            return cls(folder, int(state["step"]), ids)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{folder} holds no checkpoint: {error}") from error

    def restore(self, student: Student, optimizer: torch.optim.Optimizer) -> None:
        """Puts weights and moments back.

        Raises:
            DataError: when they are of another model.
        """
        try:
            student.load_weights(self.model_folder)
            state: Any = torch.load(
                self.folder / "optimizer.pt", map_location=student.device, weights_only=True
            )
            optimizer.load_state_dict(state)
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"checkpoint {self.folder} does not fit student.model: {reason}"
            ) from error


def save_checkpoint(
    config: RunConfig,
    *,
    step: int,
    student: Student,
    optimizer: torch.optim.Optimizer,
    manifests: dict[str, Manifest],
) -> Path:
    """Writes the checkpoint of a step (steps done, from 1), whole or not at all; its folder."""
    folder = config.output_dir / CHECKPOINTS / f"step-{step:08d}"
    with replacing_folder(folder) as temporary:
        student.save(temporary / "model")
        torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
        write_resolved(config, temporary / "config.yaml")
        told = {name: manifest.model_dump(mode="json") for name, manifest in manifests.items()}
        (temporary / "manifests.json").write_text(json.dumps(told, indent=2))
        (temporary / "state.json").write_text(json.dumps({"step": step}))
    return folder


def starting_checkpoint(config: RunConfig) -> Checkpoint | None:
    """Where the run begins: a checkpoint, or None for the beginning.

    Raises:
        ConfigError: when the output folder holds a run that was not asked to be resumed.
    """
    wanted = config.resume_from_checkpoint
    if isinstance(wanted, Path):
        return Checkpoint.open(wanted)
    found = sorted((config.output_dir / CHECKPOINTS).glob("step-*"))
    if wanted:
        return Checkpoint.open(found[-1]) if found else None
    if (config.output_dir / JOURNAL).exists():
        raise ConfigError(
            f"{config.output_dir} already holds a run; set resume_from_checkpoint=true to go on "
            "with it, or choose another output_dir"
        )
    return None
