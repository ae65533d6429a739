"""Methods that the trainer adds to vLLM's worker processes.

vLLM samples from every row of the head, including padding rows without a token. The worker sets
these logits to ``-inf`` before they are normalized.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mopd_protocol.runtime.engine_end import end_engine_with

#: Warns at every push about parameters without weights in a file (rotary tables, a tied head).
#: Missing weights are found by the check after a push.
_RELOADING = logging.getLogger("vllm.model_executor.model_loader.reload")


class RolloutWorkerExtension:
    """Mixin of vLLM's worker class (``worker_extension_cls``), called through its RPC."""

    model_runner: Any  # vLLM's, on any platform
    device: torch.device | None
    reload_weights: Callable[..., None]

    def mask_head(self, padding: list[int]) -> None:
        """Mask these rows in all logits, also after later pushes."""
        model = self.model_runner.model
        compute_logits = model.compute_logits
        rows = torch.tensor(padding, dtype=torch.int64, device=self.device)

        def masked(*inputs: Any, **options: Any) -> Tensor | None:
            logits: Tensor | None = compute_logits(*inputs, **options)
            # With a sharded head only one worker gets the logits.
            return None if logits is None else logits.index_fill_(-1, rows, -torch.inf)

        model.compute_logits = masked

    def load_weights_from_folder(self, folder: str) -> None:
        """Load the weights of a Hugging Face folder."""
        _RELOADING.setLevel(logging.ERROR)
        self.reload_weights(weights_path=folder)
        model = self.model_runner.model
        named = dict(model.named_parameters(remove_duplicate=False))
        for name, weight in named.items():
            owner = name.rpartition(".")[0]
            tied = any(other is weight for key, other in named.items() if key != name)
            if tied and owner.endswith("lm_head"):
                # vLLM 0.32.0 loads only the embedding and does not update the tied head, whose
                # products on a CPU use a packed copy.
                head = model.get_submodule(owner)
                head.quant_method.process_weights_after_loading(head)

    def end_with(self, trainer: int) -> bool:
        """See ``end_engine_with``."""
        return end_engine_with(trainer)
