"""Checkpoints: complete training state for exact resumption.

Random numbers, data order and learning rate are functions of seed and step; the state is therefore
weights, optimizer moments and the step. A checkpoint is written to a temporary folder and renamed;
a list of its files with sizes and hashes reveals files that the disk lost or changed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mopd_protocol.errors import CheckpointError, ResumeError, WeightsError
from mopd_protocol.manifest import Manifest
from mopd_protocol.runtime.atomic_file import replacing_folder
from mopd_protocol.runtime.checkpoint_files import require_consistent_files
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.loading import write_resolved
from mopd_trainer.config.run import RunConfig
from mopd_trainer.run_folder.disk_errors import disk_errors
from mopd_trainer.student.student import Student
from mopd_trainer.student.tokenizer_files import warn_about_reload

CHECKPOINTS = "checkpoints"
FINAL = "final"
_STATE, _OPTIMIZER = "state.json", "optimizer.pt"
#: Weights of self-teachers, named ``teacher/parameter``.
_TEACHERS = "teachers.safetensors"
_SMALL_FILES = 32_000_000  # upper bound in bytes of tokenizer, manifests and settings


class TeacherState(Protocol):
    """Teachers whose weights change during the run: ``LocalTeachers``."""

    def state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Return the weights of each such teacher."""
        ...

    def load_state(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Load them; KeyError for a missing one."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """Metadata of a checkpoint on disk."""

    folder: Path
    step: int  # finished steps
    manifest_ids: dict[str, str]  # teacher name -> manifest id
    losses: dict[str, str]  # teacher name -> type of its loss, also where ``auto`` selected it
    identity: RunIdentity
    student_tokenizer: str  # fingerprint
    metric: float | None  # mean of best_checkpoint_metric since the previous checkpoint
    metric_name: str | None  # best_checkpoint_metric when the checkpoint was saved
    hashes: dict[str, str]  # file -> SHA-256; empty in checkpoints of earlier versions

    @property
    def model_folder(self) -> Path:
        """Folder of the student, as saved by ``Student.save``."""
        return self.folder / "model"

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Load the metadata and verify that no file is missing; tensors are not read.

        Raises:
            CheckpointError: if the folder has no complete checkpoint; ``key`` is the damaged file.
        """
        try:
            state = json.loads((folder / _STATE).read_text())
            manifests = json.loads((folder / "manifests.json").read_text())
            checkpoint = cls(
                folder,
                int(state["step"]),
                {name: manifest["manifest_id"] for name, manifest in manifests.items()},
                state.get("losses", {}),  # missing in checkpoints of earlier versions
                RunIdentity(**state["run"]),
                state["student_tokenizer"],
                state["metric"],
                state.get("metric_name"),  # missing in checkpoints of earlier versions
                dict(state.get("sha256", {})),
            )
            files: dict[str, int] = state["files"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{folder}: no checkpoint found ({type(error).__name__}: {error})", key=str(folder)
            ) from error
        for name, size in files.items():
            path = folder / name
            actual = path.stat().st_size if path.is_file() else None
            if actual != size:
                problem = "not found" if actual is None else f"found {actual:,} bytes"
                raise CheckpointError(
                    f"{folder}: damaged: {name} ({problem}, expected {size:,} bytes). Use another "
                    "checkpoint.",
                    key=str(path),
                )
        return checkpoint

    def verify(self) -> None:
        """Compare the contents of all files with their hashes, about a second per gigabyte.

        Raises:
            CheckpointError: if a file has changed; ``key`` is the file.
        """
        for name, expected in self.hashes.items():
            path = self.folder / name
            actual = _hash(path)
            if actual != expected:
                raise CheckpointError(
                    f"{self.folder}: damaged: {name} (found SHA-256 {actual[:12]}, expected "
                    f"{expected[:12]}). Use another checkpoint.",
                    key=str(path),
                )

    def restore(
        self,
        student: Student,
        optimizer: torch.optim.Optimizer,
        teachers: TeacherState | None = None,
    ) -> None:
        """Load weights, optimizer moments, and the weights of self-teachers.

        Raises:
            ResumeError: if the checkpoint belongs to another model.
            CheckpointError: if tensors are damaged.
        """
        if self.student_tokenizer != student.table.fingerprint:
            raise ResumeError(
                f"student.model: checkpoint {self.folder} has another tokenizer (found "
                f"{student.table.fingerprint[:12]}, expected {self.student_tokenizer[:12]})",
                key="student.model",
            )
        try:
            # The types of the weights are those of the student that was saved.
            require_consistent_files(str(self.folder), self.model_folder, quantized=True)
        except WeightsError as error:
            raise self._damaged(f"{error.key} is incomplete or contradicts itself.") from error
        try:
            student.load_weights(self.model_folder)
            state: Any = torch.load(
                self.folder / _OPTIMIZER, map_location=student.device, weights_only=True
            )
            optimizer.load_state_dict(state)
            states = self._teacher_states()
        except (SafetensorError, UnpicklingError, EOFError) as error:
            raise self._damaged(f"loading tensors failed ({type(error).__name__}).") from error
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ResumeError(
                f"student.model: checkpoint {self.folder} belongs to another model: {reason}",
                key="student.model",
            ) from error
        if teachers is None:
            return
        try:
            teachers.load_state(states)
        except KeyError as error:
            raise ResumeError(
                f"teachers: checkpoint {self.folder} has other self-teachers (found "
                f"{', '.join(states) or 'none'}, expected {', '.join(teachers.state())}; missing "
                f"{error}). Resume with the teachers of the checkpoint.",
                key="teachers",
            ) from error

    def _teacher_states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the weights of self-teachers; empty if the run had none that change."""
        path, states = self.folder / _TEACHERS, dict[str, dict[str, torch.Tensor]]()
        for key, value in (load_file(path) if path.is_file() else {}).items():
            teacher, _, name = key.partition("/")
            states.setdefault(teacher, {})[name] = value
        return states

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder}: damaged: {reason} Set resume_from_checkpoint to an earlier "
            "checkpoint.",
            key=str(self.folder),
        )


def save_checkpoint(
    config: RunConfig,
    *,
    step: int,
    student: Student,
    optimizer: torch.optim.Optimizer,
    manifests: Mapping[str, Manifest],
    identity: RunIdentity,
    losses: Mapping[str, str] = MappingProxyType({}),
    metric: float | None = None,
    teachers: Mapping[str, Mapping[str, torch.Tensor]] = MappingProxyType({}),
) -> Path:
    """Save the checkpoint of a step (finished steps, from 1) completely or not at all.

    Args:
        teachers: weights of self-teachers.

    Returns:
        The folder of the checkpoint.

    Raises:
        DiskError: if saving fails; existing checkpoints are unchanged.
    """
    folder = checkpoint_folder(config, step)
    moments: dict[str, Any] = optimizer.state_dict()
    weights = {
        f"{teacher}/{name}": value.contiguous()
        for teacher, state in teachers.items()
        for name, value in state.items()
    }
    with (
        disk_errors(
            folder,
            f"the checkpoint of step {step}",
            needed=_bytes(student.trained()) + _bytes(moments) + _bytes(weights) + _SMALL_FILES,
            kept="earlier checkpoints are complete",
        ),
        replacing_folder(folder) as temporary,
    ):
        student.save(temporary / "model")
        with (temporary / _OPTIMIZER).open("wb") as file:
            torch.save(moments, file)  # given a path, torch would hide the reason of a failure
        if weights:
            save_file(weights, temporary / _TEACHERS)
        write_resolved(config, temporary / "config.yaml")
        plain = {name: manifest.model_dump(mode="json") for name, manifest in manifests.items()}
        (temporary / "manifests.json").write_text(json.dumps(plain, indent=2))
        state = {
            "step": step,
            "run": asdict(identity),
            "losses": dict(losses),
            "student_tokenizer": student.table.fingerprint,
            "metric": metric,
            "metric_name": config.best_checkpoint_metric,
            "files": _sizes(temporary),
            "sha256": {name: _hash(temporary / name) for name in _sizes(temporary)},
        }
        (temporary / _STATE).write_text(json.dumps(state, indent=2))
    return folder


def save_student(student: Student, folder: Path, dtype: torch.dtype | None = None) -> Path:
    """Save the student without optimizer, completely or not at all; return the folder.

    A tokenizer that reloads as another one is a warning: the weights are saved.

    Args:
        dtype: see ``Student.save``.

    Raises:
        DiskError: if saving fails.
    """
    needed = _bytes(student.trained()) + _SMALL_FILES
    kept = "its checkpoints are complete"
    with (
        disk_errors(folder, "the student", needed=needed, kept=kept),
        replacing_folder(folder) as temporary,
    ):
        student.save(temporary, dtype)
    warn_about_reload(student.tokenizer, folder)
    return folder


def checkpoint_folder(config: RunConfig, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return config.output_dir / CHECKPOINTS / f"step-{step:08d}"


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bytes(values: Any) -> int:
    """Return the size of all tensors in nested dictionaries and lists."""
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    if isinstance(values, dict):
        values = [*values.values()]
    return sum(map(_bytes, values)) if isinstance(values, list) else 0
