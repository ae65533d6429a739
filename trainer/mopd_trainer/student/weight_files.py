"""``WeightFiles``: formats of a student's weights on disk."""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from mopd_protocol.runtime.model_weights import load_complete


class WeightFiles(Protocol):
    """A format of the trained weights on disk."""

    def write(self, model: PreTrainedModel, folder: Path) -> None:
        """Save the weights of an unsharded model, and the config needed to load them."""
        ...

    def read(self, model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
        """Load the weights by their names in this model, which is not changed.

        Raises:
            ValueError: when the folder contains another format, or weights of another model.
        """
        ...


class FullModelFiles:
    """All weights as a Hugging Face folder, in the precision of the weights."""

    def write(self, model: PreTrainedModel, folder: Path) -> None:
        """See ``WeightFiles``."""
        model.save_pretrained(folder)

    def read(self, model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
        """See ``WeightFiles``; buffers are included."""
        saved: Any = load_complete(
            str(folder), type(model).from_pretrained, folder, dtype=model.dtype
        )
        parameters: dict[str, Tensor] = {
            name: p.data for name, p in saved.named_parameters() if p.requires_grad
        }
        return parameters | dict(saved.named_buffers())
