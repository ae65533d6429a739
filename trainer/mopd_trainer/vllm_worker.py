"""What the trainer adds to the worker processes of a vLLM that writes for it.

vLLM samples from every row of the head, also those that a model has only to make its width a round
number. Completions are of ids that have a token, so those logits become ``-inf`` before anything
is normalized or drawn.
"""

from typing import Any

import torch
from torch import Tensor

from mopd_protocol.engine_end import end_engine_with


class WorkerExtension:
    """Mixed into vLLM's worker class by name (``worker_extension_cls``), called through its RPC."""

    model_runner: Any  # vLLM's, on any platform
    device: torch.device | None

    def mask_head(self, padding: list[int]) -> None:
        """Masks these rows in all logits from now on, whatever weights are pushed."""
        model = self.model_runner.model
        compute_logits = model.compute_logits
        rows = torch.tensor(padding, dtype=torch.int64, device=self.device)

        def masked(*inputs: Any, **options: Any) -> Tensor | None:
            logits: Tensor | None = compute_logits(*inputs, **options)
            # Of several workers that share a head, only one gets its logits.
            return None if logits is None else logits.index_fill_(-1, rows, -torch.inf)

        model.compute_logits = masked

    def end_with(self, trainer: int) -> bool:
        """See ``end_engine_with``."""
        return end_engine_with(trainer)
