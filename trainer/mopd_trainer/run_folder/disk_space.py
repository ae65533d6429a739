"""Disk space that a run needs for its checkpoints and its trained model."""

import shutil
from pathlib import Path

from mopd_protocol.errors import DiskError
from mopd_trainer.config.run import RunConfig
from mopd_trainer.run_folder.checkpoint import CHECKPOINTS, FINAL

#: Bytes per trained parameter of a checkpoint: weights and two moments in float32.
_CHECKPOINT_BYTES = 12
_WEIGHT_BYTES = 4


def needed_space(config: RunConfig, trained: int) -> int:
    """Return the bytes that the run will add to its folder, without logs and recordings.

    Args:
        trained: number of trained parameters.
    """
    saved = 1 + config.max_steps // (config.save_steps or config.max_steps)
    kept = min(config.keep_checkpoints or saved, saved) + 1  # one more exists while saving
    copy = trained * _CHECKPOINT_BYTES
    existing = [
        path.stat().st_size
        for name in (CHECKPOINTS, FINAL)
        for path in (config.output_dir / name).rglob("*")
        if path.is_file()
    ]
    return max(kept * copy + trained * _WEIGHT_BYTES - sum(existing), copy)


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
