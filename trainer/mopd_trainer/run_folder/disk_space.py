"""Disk space that a run needs for its checkpoints and its trained model."""

import shutil
from pathlib import Path

from mopd_protocol.errors import DiskError
from mopd_trainer.config.run import RunConfig
from mopd_trainer.run_folder.checkpoint import CHECKPOINTS, FINAL

#: Bytes per trained parameter of a checkpoint: weights and two moments in float32.
_CHECKPOINT_BYTES = 12
_WEIGHT_BYTES = 4


def kept_checkpoints(config: RunConfig) -> int:
    """Return the number of checkpoints in the folder of the finished run."""
    saved, best = _saved_checkpoints(config), 1 if config.best_checkpoint_metric else 0
    return min(config.keep_checkpoints + best, saved) if config.keep_checkpoints else saved


def _saved_checkpoints(config: RunConfig) -> int:
    return -(-config.max_steps // (config.save_steps or config.max_steps))


def checkpoint_size(config: RunConfig, trained: int) -> int:
    """Return the bytes of a checkpoint with this number of trained parameters, and those of
    self-teachers that change."""
    changing = sum(each.weights in ("average", "copy") for each in config.teachers.values())
    return trained * (_CHECKPOINT_BYTES + changing * _WEIGHT_BYTES)


def peak_space(config: RunConfig, trained: int) -> int:
    """Return the most bytes that checkpoints and the trained model take during the run."""
    kept = min(kept_checkpoints(config) + 1, _saved_checkpoints(config))  # one more while saving
    return kept * checkpoint_size(config, trained) + trained * _WEIGHT_BYTES


def needed_space(config: RunConfig, trained: int) -> int:
    """Return the bytes that the run will add to its folder, without logs and recordings.

    Args:
        trained: number of trained parameters.
    """
    existing = [
        path.stat().st_size
        for name in (CHECKPOINTS, FINAL)
        for path in (config.output_dir / name).rglob("*")
        if path.is_file()
    ]
    return max(peak_space(config, trained) - sum(existing), checkpoint_size(config, trained))


def free_space(folder: Path) -> int:
    """Return the free bytes of the disk of a folder that may not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_space(config: RunConfig, trained: int) -> None:
    """Check the disk before the first step.

    Raises:
        DiskError: if the free space is too small for the checkpoints; ``key`` is the folder.
    """
    needed, free = needed_space(config, trained), free_space(config.output_dir)
    if free < needed:
        raise DiskError(
            f"output_dir: {config.output_dir} has too little space for the checkpoints (found "
            f"{free / 1e9:,.2f} GB free, expected {needed / 1e9:,.2f} GB). Free disk space, lower "
            "keep_checkpoints, or choose another output_dir.",
            key=str(config.output_dir),
        )
