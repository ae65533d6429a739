"""Extension of vLLM's worker processes.

vLLM normalizes over every row of the head, including padding rows. The teacher's distributions
cover ids that have a token, so the logits of padding rows become ``-inf`` before the softmax,
which is exact.
"""

from typing import Any

import torch
from torch import Tensor

from mopd_protocol.runtime.engine_end import end_engine_with


class ScoringWorkerExtension:
    """Mixed into vLLM's worker class by name (``worker_extension_cls``), called by its RPC."""

    model_runner: Any  # vLLM's, on any platform
    device: torch.device | None

    def mask_head(self, padding: list[int]) -> int:
        """Mask these rows in all later logits of the worker's model; return their number."""
        model = self.model_runner.model
        compute_logits = model.compute_logits
        rows = torch.tensor(padding, dtype=torch.int64, device=self.device)

        def compute_masked_logits(*inputs: Any, **options: Any) -> Tensor | None:
            logits: Tensor | None = compute_logits(*inputs, **options)
            # Only one of the workers that share a head has its logits.
            return None if logits is None else logits.index_fill_(-1, rows, -torch.inf)

        model.compute_logits = compute_masked_logits
        return len(padding)

    def exit_with(self, server: int) -> bool:
        """See ``end_engine_with``."""
        return end_engine_with(server)
