"""What the teacher adds to vLLM's worker processes.

vLLM normalizes over every row of the head, also those that a model has only to make its width a
round number. The teacher's distributions are over ids that have a token, so those logits become
``-inf`` before anything is normalized, which is exact.
"""

from typing import Any

import torch
from torch import Tensor

from mopd_protocol.runtime.engine_end import end_engine_with


class ScoringWorkerExtension:
    """Mixed into vLLM's worker class by name (``worker_extension_cls``), called through its RPC."""

    model_runner: Any  # vLLM's, on any platform
    device: torch.device | None

    def mask_head(self, padding: list[int]) -> int:
        """Masks these rows in all logits that the worker's model computes from now on.

        Returns how many they are.
        """
        model = self.model_runner.model
        compute_logits = model.compute_logits
        rows = torch.tensor(padding, dtype=torch.int64, device=self.device)

        def masked(*inputs: Any, **options: Any) -> Tensor | None:
            logits: Tensor | None = compute_logits(*inputs, **options)
            # Of several workers that share a head, only one gets its logits.
            return None if logits is None else logits.index_fill_(-1, rows, -torch.inf)

        model.compute_logits = masked
        return len(padding)

    def end_with(self, server: int) -> bool:
        """See ``end_engine_with``."""
        return end_engine_with(server)
