"""Checkpoints: everything that a run needs to go on as if it had never stopped.

Random numbers, the data's order and the learning rate are functions of the seed and the step, so
weights, optimizer moments and the step's number are all the state there is. A checkpoint is
written under another name and renamed: what has the name is whole, unless the disk lost a part
of it, which the list of its files would tell.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.manifest import Manifest
from mopd_protocol.runtime.atomic_file import replacing_folder
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.loading import write_resolved
from mopd_trainer.config.run import RunConfig
from mopd_trainer.run_folder.disk_errors import explained_writing
from mopd_trainer.student.student import Student

CHECKPOINTS = "checkpoints"
FINAL = "final"
_STATE, _OPTIMIZER = "state.json", "optimizer.pt"
_SMALL_FILES = 32_000_000  # bytes: tokenizer, manifests and settings beside the tensors, at most


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: steps done, of which run, and with which teachers."""

    folder: Path
    step: int
    manifest_ids: dict[str, str]  # teacher name -> manifest id
    identity: RunIdentity
    student_tokenizer: str  # fingerprint
    metric: float | None  # the mean, since the checkpoint before, of what the best is chosen by
    metric_name: str | None  # what that was, in the part of the run that saved it

    @property
    def model_folder(self) -> Path:
        """The student as ``Student.save`` writes it."""
        return self.folder / "model"

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads what a checkpoint is about, not its tensors, and that all its files are there.

        Raises:
            ConfigError: when there is no checkpoint in the folder, or not the whole of it.
        """
        try:
            state = json.loads((folder / _STATE).read_text())
            manifests = json.loads((folder / "manifests.json").read_text())
            checkpoint = cls(
                folder,
                int(state["step"]),
                {name: manifest["manifest_id"] for name, manifest in manifests.items()},
                RunIdentity(**state["run"]),
                state["student_tokenizer"],
                state["metric"],
                state.get("metric_name"),  # earlier versions did not say
            )
            files: dict[str, int] = state["files"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{folder} holds no checkpoint: {type(error).__name__}: {error}"
            ) from error
        for name, expected in files.items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != expected:
                has = "is missing" if found is None else f"has {found:,} bytes"
                raise ConfigError(
                    f"{folder} is damaged: {name} {has}, expected {expected:,} bytes; "
                    "another checkpoint is needed"
                )
        return checkpoint

    def restore(self, student: Student, optimizer: torch.optim.Optimizer) -> None:
        """Puts weights and moments back.

        Raises:
            DataError: when they are of another model, or damaged.
        """
        if self.student_tokenizer != student.table.fingerprint:
            raise DataError(
                f"checkpoint {self.folder} does not fit student.model: its tokenizer is "
                f"{self.student_tokenizer[:12]}, the model's is {student.table.fingerprint[:12]}"
            )
        try:
            student.load_weights(self.model_folder)
            state: Any = torch.load(
                self.folder / _OPTIMIZER, map_location=student.device, weights_only=True
            )
            optimizer.load_state_dict(state)
        except (SafetensorError, UnpicklingError, EOFError) as error:
            raise DataError(
                f"checkpoint {self.folder} is damaged: its tensors cannot be read "
                f"({type(error).__name__}); name an earlier one by resume_from_checkpoint"
            ) from error
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
    manifests: Mapping[str, Manifest],
    identity: RunIdentity,
    metric: float | None = None,
) -> Path:
    """Writes the checkpoint of a step (steps done, from 1), whole or not at all; its folder.

    Raises:
        DataError: when the disk takes no more; what was there before is as it was.
    """
    folder = checkpoint_folder(config, step)
    moments: dict[str, Any] = optimizer.state_dict()
    with (
        explained_writing(
            folder,
            f"the checkpoint of step {step}",
            needed=_bytes(student.trained()) + _bytes(moments) + _SMALL_FILES,
            kept="checkpoints before it are whole",
        ),
        replacing_folder(folder) as temporary,
    ):
        student.save(temporary / "model")
        with (temporary / _OPTIMIZER).open("wb") as file:
            torch.save(moments, file)  # torch's own writing of files does not tell what went wrong
        write_resolved(config, temporary / "config.yaml")
        told = {name: manifest.model_dump(mode="json") for name, manifest in manifests.items()}
        (temporary / "manifests.json").write_text(json.dumps(told, indent=2))
        state = {
            "step": step,
            "run": asdict(identity),
            "student_tokenizer": student.table.fingerprint,
            "metric": metric,
            "metric_name": config.best_checkpoint_metric,
            "files": _sizes(temporary),
        }
        (temporary / _STATE).write_text(json.dumps(state, indent=2))
    return folder


def save_student(student: Student, folder: Path) -> Path:
    """Writes the student alone, as ``Student.save`` does, whole or not at all; the folder.

    Raises:
        DataError: when the disk takes no more.
    """
    needed = _bytes(student.trained()) + _SMALL_FILES
    with (
        explained_writing(folder, "the student", needed=needed, kept="its checkpoints are whole"),
        replacing_folder(folder) as temporary,
    ):
        student.save(temporary)
    return folder


def checkpoint_folder(config: RunConfig, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return config.output_dir / CHECKPOINTS / f"step-{step:08d}"


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _bytes(values: Any) -> int:
    """Of all tensors in nested dictionaries and lists."""
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    if isinstance(values, dict):
        return sum(_bytes(value) for value in values.values())
    if isinstance(values, list):
        return sum(_bytes(value) for value in values)
    return 0
