"""Checkpoint discovery and retention."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from mopd_protocol.errors import CheckpointError, ResumeError
from mopd_protocol.manifest import Manifest
from mopd_protocol.runtime.atomic_file import remove_folder, remove_leftovers
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.run import RunConfig
from mopd_trainer.metrics.step_metrics import Metrics, mean
from mopd_trainer.run_folder.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    TeacherState,
    save_checkpoint,
)
from mopd_trainer.run_folder.files import JOURNAL
from mopd_trainer.student.student import Student

logger = logging.getLogger(__name__)


def starting_checkpoint(config: RunConfig, identity: RunIdentity) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None for a new run. Changes nothing on disk.

    Raises:
        ResumeError: if the output folder contains a run and ``resume_from_checkpoint`` is not set,
            the checkpoint belongs to another run or is after ``max_steps``, or resuming from
            outside the output folder would remove later checkpoints.
        CheckpointError: if no checkpoint is complete.
    """
    setting = config.resume_from_checkpoint
    if not setting:
        if (config.output_dir / JOURNAL).exists() or _folders(config):
            raise ResumeError(
                f"output_dir: {config.output_dir} already contains a run. Set "
                "resume_from_checkpoint=true to resume it, or choose another output_dir.",
                key="output_dir",
            )
        return None
    checkpoint = _sound(setting) if isinstance(setting, Path) else _latest(config)
    if checkpoint is None:
        logger.warning(
            "resume_from_checkpoint: no checkpoint found in %s; the run starts from the beginning",
            config.output_dir,
        )
        return None
    if not config.accept_changed_settings:
        identity.require_same(checkpoint.identity, source=f"checkpoint {checkpoint.folder}")
    if checkpoint.step > config.max_steps:
        raise ResumeError(
            f"max_steps: checkpoint {checkpoint.folder} is of a later step (found "
            f"{config.max_steps:,}, expected {checkpoint.step:,} or more). Increase max_steps, or "
            "set resume_from_checkpoint to an earlier checkpoint.",
            key="max_steps",
        )
    own = checkpoint.folder.resolve().parent == (config.output_dir / CHECKPOINTS).resolve()
    later = [folder.name for step, folder in _folders(config) if step > checkpoint.step]
    if later and not own:
        raise ResumeError(
            f"output_dir: {config.output_dir} contains {', '.join(later)}, which resuming from "
            f"{checkpoint.folder} would remove. Set resume_from_checkpoint=true to resume from "
            "the latest, or choose another output_dir.",
            key="output_dir",
        )
    _report_changed_length(config, checkpoint)
    return checkpoint


def _report_changed_length(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Log how another ``max_steps`` changes the learning rate, which decays until the last step."""
    before, step = checkpoint.identity.max_steps, checkpoint.step
    if before is None or before == config.max_steps or step == config.max_steps:
        return
    rate_before = config.student.learning_rate_at(step, max_steps=before)
    rate = config.student.learning_rate_at(step, max_steps=config.max_steps)
    if rate != rate_before:
        logger.warning(
            "max_steps was %d, is %d: the learning rate decays until the new last step, and is "
            "%.3g in step %d instead of %.3g",
            before,
            config.max_steps,
            rate,
            step + 1,
            rate_before,
        )


class CheckpointManager:
    """Saves checkpoints, and removes those that are no longer kept.

    Args:
        done: finished steps. Later checkpoints and interrupted writes are removed, because these
            steps are repeated.
    """

    def __init__(
        self,
        config: RunConfig,
        identity: RunIdentity,
        manifests: Mapping[str, Manifest],
        losses: Mapping[str, str] = MappingProxyType({}),
        *,
        done: int,
    ) -> None:
        self._config = config
        self.identity = identity
        self._manifests = manifests
        self._losses = losses
        self._metric_values: list[float] = []  # since the last checkpoint
        self._protected: set[Path] = set()
        written_folders = [config.output_dir, config.output_dir / CHECKPOINTS]
        if config.projection_cache is None:  # a shared one may be in use by another run
            written_folders.append(config.projection_folder)
        for folder in written_folders:
            remove_leftovers(folder)
        for step, folder in _folders(config):
            if step > done:
                logger.warning("removing %s: the run resumes after step %d", folder, done)
                remove_folder(folder)
        self._prune()  # in case a kill interrupted the last one

    def observe(self, metrics: Metrics) -> None:
        """Record the metrics of a step."""
        value = metrics.get(self._config.best_checkpoint_metric or "", math.nan)
        if math.isfinite(value):
            self._metric_values.append(value)

    def protect(self, steps: int) -> Path | None:
        """Keep the latest checkpoint of at most ``steps`` steps; return it, if there is one."""
        folders = [folder for step, folder in _folders(self._config) if step <= steps]
        self._protected.update(folders[-1:])
        return folders[-1] if folders else None

    def save(
        self,
        step: int,
        student: Student,
        optimizer: torch.optim.Optimizer,
        local_teachers: TeacherState | None = None,
    ) -> Path:
        """Save the checkpoint of a step (from 1), then remove older ones.

        Raises:
            DiskError: if saving fails; no older checkpoint is removed.
        """
        folder = save_checkpoint(
            self._config,
            step=step,
            student=student,
            optimizer=optimizer,
            manifests=self._manifests,
            identity=self.identity,
            losses=self._losses,
            metric=self._mean_metric(),
            teachers={} if local_teachers is None else local_teachers.state(),
        )
        self._metric_values.clear()
        self._prune()
        return folder

    def _mean_metric(self) -> float | None:
        name = self._config.best_checkpoint_metric
        if name is not None and not self._metric_values:
            logger.warning("metric %r was not measured since the last checkpoint", name)
        values = self._metric_values
        if name is not None and name.startswith("evaluation/"):
            values = values[-1:]  # of the checkpoint's weights, or of the closest before
        return mean(values) if values else None

    def _prune(self) -> None:
        if not self._config.keep_checkpoints:
            return
        folders = [folder for _, folder in _folders(self._config)]
        outdated = folders[: -self._config.keep_checkpoints]
        best = self._best(folders) if outdated and self._config.best_checkpoint_metric else None
        for folder in outdated:
            if folder != best and folder not in self._protected:
                remove_folder(folder)

    def _best(self, folders: list[Path]) -> Path | None:
        sign = -1 if self._config.maximizes_best_metric else 1
        candidates: list[tuple[float, Path]] = []
        for folder in folders:
            try:
                checkpoint = Checkpoint.open(folder)
            except CheckpointError:
                continue
            same = checkpoint.metric_name == self._config.best_checkpoint_metric
            if same and checkpoint.metric is not None:
                candidates.append((sign * checkpoint.metric, folder))
        return min(candidates)[1] if candidates else None


def _sound(folder: Path) -> Checkpoint:
    """Open a checkpoint and verify its files."""
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    return checkpoint


def _latest(config: RunConfig) -> Checkpoint | None:
    """Return the latest complete checkpoint."""
    folders = [folder for _, folder in reversed(_folders(config))]
    errors: list[CheckpointError] = []
    for folder in folders:
        try:
            checkpoint = _sound(folder)
        except CheckpointError as error:
            errors.append(error)
            continue
        for error in errors:
            logger.warning("%s; resuming from %s instead", error, checkpoint.folder.name)
        return checkpoint
    if errors:
        raise CheckpointError(
            f"{config.output_dir / CHECKPOINTS}: no complete checkpoint found among {len(folders)} "
            f"({errors[0]}). Choose another output_dir to start again.",
            key=errors[0].key,
        )
    return None


def _folders(config: RunConfig) -> list[tuple[int, Path]]:
    """Return steps and folders of all checkpoints, complete or not, oldest first."""
    folders = (config.output_dir / CHECKPOINTS).glob("step-*")
    steps = ((folder.name.removeprefix("step-"), folder) for folder in folders)
    return sorted((int(step), folder) for step, folder in steps if step.isdecimal())
