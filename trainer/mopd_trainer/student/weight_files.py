"""``WeightFiles``: formats of a student's weights on disk."""

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mopd_protocol.runtime.model_weights import load_complete


class WeightFiles(Protocol):
    """A format of the trained weights on disk."""

    def write(self, model: PreTrainedModel, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Save the weights of an unsharded model, and the config needed to load them.

        Args:
            dtype: precision of all weights in the files; default: that of the weights.
        """
        ...

    def read(self, model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
        """Load the weights by their names in this model, which is not changed.

        Raises:
            ValueError: when the folder contains another format, or weights of another model.
        """
        ...


class FullModelFiles:
    """All weights as a Hugging Face folder, in the precision of the weights."""

    def write(self, model: PreTrainedModel, folder: Path, dtype: torch.dtype | None = None) -> None:
        """See ``WeightFiles``."""
        if dtype in (None, model.dtype):
            model.save_pretrained(folder)
            return
        model.save_pretrained(folder, state_dict=_converted(model.state_dict(), dtype))
        path = folder / "config.json"  # save_pretrained writes the precision of the model
        config = json.loads(path.read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    def read(self, model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
        """See ``WeightFiles``; buffers are included."""
        saved: Any = load_complete(
            str(folder), type(model).from_pretrained, folder, dtype=model.dtype
        )
        parameters: dict[str, Tensor] = {
            name: p.data for name, p in saved.named_parameters() if p.requires_grad
        }
        return parameters | dict(saved.named_buffers())


def _converted(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return converted tensors; tied ones stay one tensor."""
    converted: dict[tuple[int, torch.Size], Tensor] = {}
    result: dict[str, Tensor] = {}
    for name, weight in weights.items():
        key = weight.data_ptr(), weight.shape
        if key not in converted:
            converted[key] = weight.to(dtype) if weight.is_floating_point() else weight
        result[name] = converted[key]
    return result
