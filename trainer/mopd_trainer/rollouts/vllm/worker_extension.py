"""What the trainer adds to the worker processes of a vLLM that writes for it.

vLLM samples from every row of the head, also those that a model has only to make its width a round
number. Completions are of ids that have a token, so those logits become ``-inf`` before anything
is normalized or drawn.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mopd_protocol.runtime.engine_end import end_engine_with

#: Warns at every push of what is not loaded because it has no weights of its own (tables of a
#: rotary embedding, a tied head). What is missing is found by the proof after a push.
_RELOADING = logging.getLogger("vllm.model_executor.model_loader.reload")


class RolloutWorkerExtension:
    """Mixed into vLLM's worker class by name (``worker_extension_cls``), called through its RPC."""

    model_runner: Any  # vLLM's, on any platform
    device: torch.device | None
    reload_weights: Callable[..., None]

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

    def load_weights_from_folder(self, folder: str) -> None:
        """Writes with the weights of a folder from now on, in a model's published form."""
        _RELOADING.setLevel(logging.ERROR)
        self.reload_weights(weights_path=folder)
        model = self.model_runner.model
        named = dict(model.named_parameters(remove_duplicate=False))
        for name, weight in named.items():
            owner = name.rpartition(".")[0]
            tied = any(other is weight for key, other in named.items() if key != name)
            if tied and owner.endswith("lm_head"):
                # vLLM loads the embedding alone, and leaves the head as it was made of the weights
                # before (0.32.0). On a CPU its products read a packed copy, which would stay so.
                head = model.get_submodule(owner)
                head.quant_method.process_weights_after_loading(head)

    def end_with(self, trainer: int) -> bool:
        """See ``end_engine_with``."""
        return end_engine_with(trainer)
