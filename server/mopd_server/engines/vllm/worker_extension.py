"""Extension of vLLM's worker processes.

vLLM normalizes over every row of the head, including padding rows. The teacher's distributions
cover ids that have a token, so the logits of padding rows become ``-inf`` before the softmax,
which is exact. The mass outside the top k is summed from the distribution: one minus the sum of k
float32 entries has no correct digit where a teacher is confident.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from mopd_protocol.runtime.engine_end import end_engine_with
from mopd_protocol.topk_logprobs import ABSENT_ID

#: Parameters of vLLM's ``Sampler.gather_logprobs``, which is replaced.
_PARAMETERS = ["logprobs", "num_logprobs", "token_ids"]


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

    def append_tails(self) -> bool:
        """Replace the last of the requested entries by the tail, with id -1, in all later results.

        A request for k + 1 entries then returns the k most likely ids and the tail. Ranks, which
        are not used, are not computed. Returns False if this version of vLLM is unknown.
        """
        sampler = getattr(self.model_runner, "sampler", None)
        gather = getattr(sampler, "gather_logprobs", None)
        if sampler is None or gather is None:
            return False
        if [*signature(gather).parameters] != _PARAMETERS:
            return False
        sampler.gather_logprobs = gather_with_tail
        return True

    def exit_with(self, server: int) -> bool:
        """See ``end_engine_with``."""
        return end_engine_with(server)


def gather_with_tail(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
    """Return the token, the ``num_logprobs - 1`` most likely ids and the tail of each row.

    Args:
        logprobs: ``[rows, width]``, nats; overwritten.
        num_logprobs: requested entries.
        token_ids: ``[rows]``.
    """
    from vllm.v1.outputs import LogprobsTensors  # pyright: ignore[reportMissingImports]

    columns = token_ids.long().unsqueeze(-1)
    token = logprobs.gather(-1, columns)
    top, ids = logprobs.topk(max(num_logprobs - 1, 0), dim=-1)
    tail = logprobs.scatter_(-1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True)
    missing = torch.full_like(columns, ABSENT_ID)
    return LogprobsTensors(
        torch.cat((columns, ids, missing), dim=1).to(torch.int32),
        torch.cat((token, top, tail), dim=1),
        torch.zeros(len(columns), dtype=torch.int64, device=logprobs.device),
    )
