"""``merge``: save the student of a LoRA run as an ordinary model folder."""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from mopd_protocol.errors import CheckpointError, ConfigError
from mopd_protocol.runtime.model_weights import load_complete
from mopd_trainer.config.loading import load_run
from mopd_trainer.run_folder.checkpoint import FINAL, Checkpoint, save_student
from mopd_trainer.student.identity import explained, load_tokenizer, source
from mopd_trainer.student.lora import merge_adapters
from mopd_trainer.student.student import Student


def merge(run: Path, output: Path, *, dtype: Literal["float32", "bfloat16"] = "float32") -> Path:
    """Add the adapters to the base weights, in float32 on the CPU, and save the model.

    Args:
        run: folder of a finished LoRA run, or one of its checkpoints.
        output: folder to create.
        dtype: precision of the saved weights.

    Returns:
        ``output``, which exists only if it is complete.

    Raises:
        ConfigError: if ``run`` has no LoRA student, the base model cannot be loaded or differs from
            the one in training, ``output`` already exists, or its tokenizer would reload as
            another one.
        WeightsError: if weights of the base model are missing or unexpected.
        DiskError: if saving fails.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigError(
            f"{run}: config.yaml not found, expected the output_dir of a run or a checkpoint",
            key=str(run),
        )
    config = load_run(run / "config.yaml").student
    if config.lora is None:
        raise ConfigError(
            f"{run}: the run has no student.lora. Its student is an ordinary model folder already.",
            key="student.lora",
        )
    if output.exists():
        raise ConfigError(f"{output}: already exists. Choose another folder.", key=str(output))
    adapters = _adapter_folder(run)
    with explained(config):
        model: Any = load_complete(
            f"student.model: {config.model!r}",
            AutoModelForCausalLM.from_pretrained,
            config.model,
            dtype=torch.float32,
            **source(config),
        )
    try:
        model = merge_adapters(model, adapters)
    except ValueError as error:
        raise ConfigError(
            f"student.model: {config.model!r} is not the model of the training run: {error}",
            key="student.model",
        ) from error
    model.to(getattr(torch, dtype))
    student = Student(model, load_tokenizer(config), torch.device("cpu"))
    student.identity.tokenizer_files.require_reloadable()
    return save_student(student, output)


def _adapter_folder(run: Path) -> Path:
    """Return the folder of the finished student or of a checkpoint's student."""
    if (run / FINAL).is_dir():
        return run / FINAL
    if (run / "model").is_dir():
        checkpoint = Checkpoint.open(run)
        checkpoint.verify()
        return checkpoint.model_folder
    raise CheckpointError(
        f"{run}: no finished student found. Resume the run, or use one of its checkpoints.",
        key=str(run),
    )
