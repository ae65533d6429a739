"""A run's checkpoints: where it begins, which are kept, and which go."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from mopd_protocol.errors import ConfigError
from mopd_protocol.manifest import Manifest
from mopd_protocol.runtime.atomic_file import remove_folder, remove_leftovers
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.run import RunConfig
from mopd_trainer.metrics.step_metrics import Metrics, mean
from mopd_trainer.run_folder.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    checkpoint_folder,
    save_checkpoint,
)
from mopd_trainer.run_folder.journal import JOURNAL
from mopd_trainer.student.student import Student

logger = logging.getLogger(__name__)


def starting_checkpoint(config: RunConfig, identity: RunIdentity) -> Checkpoint | None:
    """Where the run begins: a checkpoint, or None for the beginning. Changes nothing on disk.

    Raises:
        ConfigError: when the output folder holds a run that was not asked to be resumed, no
            checkpoint of it is whole, it is another run's, it has more steps than the run is to
            have, or later ones of the output folder would go for one of elsewhere.
    """
    wanted = config.resume_from_checkpoint
    if not wanted:
        if (config.output_dir / JOURNAL).exists() or _folders(config):
            raise ConfigError(
                f"{config.output_dir} already holds a run; set resume_from_checkpoint=true to go "
                "on with it, or choose another output_dir"
            )
        return None
    found = Checkpoint.open(wanted) if isinstance(wanted, Path) else _newest_whole(config)
    if found is not None and not config.accept_changed_settings:
        identity.require_same(found.identity, source=f"checkpoint {found.folder}")
    if found is not None:
        _require_steps_ahead(config, found)
    return found


def _require_steps_ahead(config: RunConfig, found: Checkpoint) -> None:
    """Raises ConfigError for a start behind the run's end, or before steps that are not its own."""
    if found.step > config.max_steps:
        raise ConfigError(
            f"max_steps is {config.max_steps:,}, but checkpoint {found.folder} is of step "
            f"{found.step:,}; raise max_steps, or name an earlier one by resume_from_checkpoint"
        )
    own = found.folder.resolve().parent == (config.output_dir / CHECKPOINTS).resolve()
    later = [folder.name for step, folder in _folders(config) if step > found.step]
    if later and not own:
        raise ConfigError(
            f"{config.output_dir} holds {', '.join(later)}, which would be removed for checkpoint "
            f"{found.folder}; set resume_from_checkpoint=true to go on with what is there, or "
            "choose another output_dir"
        )


class CheckpointManager:
    """Saves checkpoints, and removes those that are no longer to be kept.

    Args:
        done: steps that the run has done. What is on disk of later ones, and of writes that a kill
            interrupted, is removed: those steps are done again.
    """

    def __init__(
        self,
        config: RunConfig,
        identity: RunIdentity,
        manifests: Mapping[str, Manifest],
        *,
        done: int,
    ) -> None:
        self._config = config
        self.identity = identity
        self._manifests = manifests
        self._measured: list[float] = []  # the metric of the best, since the last checkpoint
        own = [config.output_dir, config.output_dir / CHECKPOINTS]
        if config.projection_cache is None:  # another one may be written to by others
            own.append(config.projection_folder)
        for folder in own:
            remove_leftovers(folder)
        for step, folder in _folders(config):
            if step > done:
                logger.warning("%s is removed: the run goes on after step %d", folder, done)
                remove_folder(folder)
        self._prune()  # a kill may have come between a checkpoint and this

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of a step (counted from 1) is to be saved."""
        every = self._config.save_steps
        return step == self._config.max_steps or bool(every and step % every == 0)

    def observe(self, metrics: Metrics) -> None:
        """Takes over a step's numbers."""
        value = metrics.get(self._config.best_checkpoint_metric or "", math.nan)
        if math.isfinite(value):
            self._measured.append(value)

    def save(self, step: int, student: Student, optimizer: torch.optim.Optimizer) -> Path:
        """Writes the checkpoint of a step (counted from 1), then lets older ones go.

        Raises:
            DataError: when the disk takes no more; none of the older ones has gone then.
        """
        folder = save_checkpoint(
            self._config,
            step=step,
            student=student,
            optimizer=optimizer,
            manifests=self._manifests,
            identity=self.identity,
            metric=self._metric(),
        )
        self._measured.clear()
        self._prune()
        return folder

    def ensure(self, step: int, student: Student, optimizer: torch.optim.Optimizer) -> str:
        """Saves the checkpoint of ``step`` steps unless it is there, or nothing was done; a clause
        that says which.

        Raises:
            DataError: as ``save``.
        """
        if step == 0:
            return "nothing was learnt yet"
        folder = checkpoint_folder(self._config, step)
        if not folder.is_dir():
            self.save(step, student, optimizer)
        return f"its checkpoint is {folder}"

    def _metric(self) -> float | None:
        name = self._config.best_checkpoint_metric
        if name is not None and not self._measured:
            logger.warning("no step since the last checkpoint measured %r", name)
        return mean(self._measured) if self._measured else None

    def _prune(self) -> None:
        if not self._config.keep_checkpoints:
            return
        folders = [folder for _, folder in _folders(self._config)]
        gone = folders[: -self._config.keep_checkpoints]
        best = self._best(folders) if gone and self._config.best_checkpoint_metric else None
        for folder in gone:
            if folder != best:
                remove_folder(folder)

    def _best(self, folders: list[Path]) -> Path | None:
        sign = 1 if self._config.best_checkpoint_mode == "min" else -1
        found: list[tuple[float, Path]] = []
        for folder in folders:
            try:
                saved = Checkpoint.open(folder)
            except ConfigError:
                continue
            same = saved.metric_name == self._config.best_checkpoint_metric
            if same and saved.metric is not None:
                found.append((sign * saved.metric, folder))
        return min(found)[1] if found else None


def _newest_whole(config: RunConfig) -> Checkpoint | None:
    """The newest checkpoint, or, where it is damaged, the newest that is not."""
    folders = [folder for _, folder in reversed(_folders(config))]
    damage: list[ConfigError] = []
    for folder in folders:
        try:
            found = Checkpoint.open(folder)
        except ConfigError as error:
            damage.append(error)
            continue
        for error in damage:
            logger.warning("%s; going on from %s instead", error, found.folder.name)
        return found
    if damage:
        raise ConfigError(
            f"none of the {len(folders)} checkpoints in {config.output_dir / CHECKPOINTS} is "
            f"whole, the newest because {damage[0]}; choose another output_dir to begin anew"
        )
    return None


def _folders(config: RunConfig) -> list[tuple[int, Path]]:
    """Steps and their checkpoints, whole or not, oldest first."""
    found = (config.output_dir / CHECKPOINTS).glob("step-*")
    named = ((folder.name.removeprefix("step-"), folder) for folder in found)
    return sorted((int(step), folder) for step, folder in named if step.isdecimal())
