"""``StoredWeights``: what of a student lies in a folder, and how it comes back."""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel


class StoredWeights(Protocol):
    """One form of a student's weights on disk: those that are trained, and no fewer."""

    def write(self, model: PreTrainedModel, folder: Path) -> None:
        """Writes the weights of now, and what is needed to read them.

        Args:
            model: whole, not in shards.
        """
        ...

    def read(self, model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
        """What was written, by the names that it has in this model; nothing is changed.

        Raises:
            ValueError: when the folder holds weights of another form, or for another model.
        """
        ...


class WholeModel:
    """All weights, as an ordinary Hugging Face folder, in the precision that they are kept in."""

    def write(self, model: PreTrainedModel, folder: Path) -> None:
        """See ``StoredWeights``."""
        model.save_pretrained(folder)

    def read(self, model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
        """See ``StoredWeights``; buffers come too."""
        saved: Any = type(model).from_pretrained(folder, dtype=model.dtype)
        parameters: dict[str, Tensor] = {
            name: p.data for name, p in saved.named_parameters() if p.requires_grad
        }
        return parameters | dict(saved.named_buffers())
