"""``mopd merge``: the student of a LoRA run as an ordinary model folder."""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from mopd_protocol.errors import ConfigError
from mopd_trainer.config.loading import load_run
from mopd_trainer.run_folder.checkpoint import FINAL, Checkpoint, save_student
from mopd_trainer.student.identity import explained, load_tokenizer, source
from mopd_trainer.student.lora import merge_adapters
from mopd_trainer.student.student import Student


def merge(run: Path, output: Path, *, dtype: Literal["float32", "bfloat16"] = "float32") -> Path:
    """Writes the model with its adapters added to its weights; ``output``, whole or not there.

    Sums are made in float32, on the CPU.

    Args:
        run: a LoRA run's folder with its finished student, or a checkpoint of it.
        dtype: what the weights are written in.

    Raises:
        ConfigError: when there is no such student, its model cannot be loaded or is another one
            than it was trained beside, or ``output`` is there already.
        DataError: when the disk takes no more.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigError(
            f"{run} holds no config.yaml; expected a run's output_dir, or one of its checkpoints"
        )
    config = load_run(run / "config.yaml").student
    if config.lora is None:
        raise ConfigError(
            f"{run} is of a run without student.lora, so there is nothing to merge: its student is "
            "an ordinary model folder already"
        )
    if output.exists():
        raise ConfigError(f"{output} is there already; name a folder that is not")
    adapters = _adapters(run)
    with explained(config):
        model: Any = AutoModelForCausalLM.from_pretrained(
            config.model, dtype=torch.float32, **source(config)
        )
    try:
        model = merge_adapters(model, adapters)
    except ValueError as error:
        raise ConfigError(f"student.model {config.model!r} is another one now: {error}") from error
    model.to(getattr(torch, dtype))
    return save_student(Student(model, load_tokenizer(config), torch.device("cpu")), output)


def _adapters(run: Path) -> Path:
    """The folder of the finished student, or of a checkpoint's."""
    if (run / FINAL).is_dir():
        return run / FINAL
    if (run / "model").is_dir():
        return Checkpoint.open(run).model_folder
    raise ConfigError(
        f"{run} holds no finished student; go on with the run, or name one of its checkpoints"
    )
