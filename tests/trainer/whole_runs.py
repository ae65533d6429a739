"""Whole runs in this process, and the files that they create."""

import asyncio
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from mopd_trainer.config.run import RunConfig
from mopd_trainer.loop import train
from mopd_trainer.metrics.table import metric_row
from mopd_trainer.training.learner import Learner


def run_here(values: dict[str, Any], **changes: Any) -> tuple[Path, str]:
    """Trains in this process; the student's folder and what was printed."""
    output = StringIO()
    config = RunConfig.model_validate({**values, **changes})
    folder = asyncio.run(train(config, Console(file=output, width=200)))
    return folder, output.getvalue()


def run_cut_off(values: dict[str, Any], *, in_step: int, **changes: Any) -> None:
    """A run that ends where a step (counted from 1) would change the weights."""
    original = Learner.update

    def update(self: Learner, *batches: Any, **output: Any) -> Any:
        if output["step"] + 1 == in_step:
            raise RuntimeError("power cut")
        return original(self, *batches, **output)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Learner, "update", update)
        with pytest.raises(RuntimeError, match="power cut"):
            run_here(values, **changes)


def journal(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's journal; every metric must be in the table of metrics."""
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line} - {"step"}
    assert not [name for name in names if metric_row(name) is None]
    return lines


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Load the state dict of a model folder."""
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_same_weights(folder: Path, other: Path) -> None:
    """To the last bit."""
    value, right = weights(folder), weights(other)
    assert value.keys() == right.keys()
    for name in value:
        assert torch.equal(value[name], right[name]), name
