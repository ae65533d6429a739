"""Disk, memory, output folder and device of a run."""

import os
from collections.abc import Iterator

import torch

from mopd_trainer.config.run import RunConfig
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.run_folder.disk_space import free_space, needed_space
from mopd_trainer.student.identity import StudentIdentity

#: Bytes per trained parameter: weights, gradient and two moments in float32.
_TRAINED_BYTES = 16


def check_resources(config: RunConfig, student: StudentIdentity) -> Iterator[Finding]:
    """Yield findings on the ranks, the output folder, the disk, and the device's memory."""
    name = "resources"
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = ranks if config.resources is None else config.resources.student
    if ranks == 1 and config.student.sharding != "none":
        text = f"student.sharding {config.student.sharding!r} has no effect on one rank."
        fix = (
            "Start the run with torchrun --nproc-per-node N or with resources.student, or set "
            "student.sharding to none."
        )
        yield Finding(name, "warning", text, fix, {"ranks": 1.0})
    folder = config.output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        fix = "Set output_dir to a folder that this user can write to."
        yield Finding(name, "failed", f"output_dir: {folder} is not writable.", fix)
        return
    needed, free = needed_space(config, student.trained), free_space(folder)
    numbers = {"disk_needed_bytes": float(needed), "disk_free_bytes": float(free)}
    text = f"checkpoints need {needed / 1e9:,.2f} GB, {free / 1e9:,.2f} GB are free."
    fix = "Free disk space, or lower keep_checkpoints."
    yield Finding(name, "ok" if needed < free else "failed", text, fix, numbers)
    if torch.accelerator.is_available() and config.student.device != "cpu":
        weights = student.parameters * (2 if config.student.dtype == "bfloat16" else 4)
        memory = weights if student.trained < student.parameters else 0
        memory += student.trained * _TRAINED_BYTES
        free_memory = float(torch.accelerator.get_memory_info()[0])
        text = f"weights and optimizer need {memory / 1e9:,.2f} of {free_memory / 1e9:,.2f} GB."
        fix = "Use student.lora, student.sharding=fsdp on several ranks, or a smaller student."
        status = "ok" if memory < free_memory else "failed"
        yield Finding(name, status, text, fix, {"memory_needed_bytes": float(memory)})
