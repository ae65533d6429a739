"""Extension of vLLM's worker processes.

vLLM normalizes over every row of the head, including padding rows. The teacher's distributions
cover ids that have a token, so the logits of padding rows become ``-inf`` before the softmax,
which is exact. The log-probabilities of prompts are replaced by ``CompletionRows``.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopd_protocol.runtime.engine_end import end_engine_with
from mopd_server.engines.vllm.completion_rows import CompletionRows, ScheduledTokens
from mopd_server.engines.vllm.processes.idle_waiting import wait_without_spinning

#: Parameters of the methods that are replaced, of vLLM's two model runners.
_V1_PARAMETERS = ["hidden_states", "num_scheduled_tokens"]
_V2_PARAMETERS = [
    "logits_fn",
    "hidden_states",
    "input_batch",
    "all_token_ids",
    "num_computed_tokens",
    "prompt_lens",
]


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

    def score_completion_rows(self, width: int) -> bool:
        """Replace the log-probabilities of prompts; return False if this vLLM is unknown.

        Args:
            width: rows of the head.
        """
        runner = self.model_runner
        device = torch.device("cpu") if self.device is None else self.device
        if device.type == "cpu":
            wait_without_spinning()

        def head(hidden_states: Tensor) -> Tensor | None:  # after ``mask_head``
            return runner.model.compute_logits(hidden_states)

        rows = CompletionRows(head, width, device)
        if _has_parameters(runner, "_get_prompt_logprobs_dict", _V1_PARAMETERS):
            _unwrap_head(runner.model)
            runner._get_prompt_logprobs_dict = rows_of_v1(runner, rows)
            return True
        worker = getattr(runner, "prompt_logprobs_worker", None)
        if _has_parameters(worker, "compute_prompt_logprobs", _V2_PARAMETERS):
            _unwrap_head(runner.model)
            runner.prompt_logprobs_worker = RowsOfV2(rows)
            return True
        # Only the last stage of a pipeline has the head, and this attribute.
        return worker is None and hasattr(runner, "prompt_logprobs_worker")

    def exit_with(self, server: int) -> bool:
        """See ``end_engine_with``."""
        return end_engine_with(server)


def rows_of_v1(
    runner: Any, rows: CompletionRows
) -> Callable[[Tensor, dict[str, int]], dict[str, Any]]:
    """Return the replacement of ``GPUModelRunner._get_prompt_logprobs_dict``."""

    def compute(hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        requests: dict[str, int] = runner.num_prompt_logprobs
        rows.keep_only([*requests])
        scheduled: list[ScheduledTokens] = []
        completed: list[str] = []
        for name in requests:
            count = num_scheduled_tokens.get(name)
            if count is None:  # preempted
                continue
            state = runner.requests[name]
            if name not in rows:
                rows.add(name, state.sampling_params.extra_args)
            first = int(state.num_computed_tokens)
            offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
            scheduled.append(ScheduledTokens(name, first, count, offset))
            if first + count >= len(state.prompt_token_ids):
                completed.append(name)
        rows.compute(hidden_states, scheduled)
        for name in completed:
            del requests[name]
        return {name: _output(*(part.cpu() for part in rows.pop(name))) for name in completed}

    return compute


class RowsOfV2:
    """Replacement of ``PromptLogprobsWorker`` of vLLM's second model runner."""

    def __init__(self, rows: CompletionRows) -> None:
        self._rows = rows

    def add_request(self, name: str, _: int, sampling: Any) -> None:
        """Start a sequence."""
        self._rows.add(name, sampling.extra_args)

    def remove_request(self, name: str) -> None:
        """End a sequence."""
        self._rows.remove(name)

    def compute_prompt_logprobs(
        self,
        logits_fn: object,
        hidden_states: Tensor,
        input_batch: Any,
        all_token_ids: object,
        num_computed_tokens: object,
        prompt_lens: NDArray[np.integer],
    ) -> dict[str, Any]:
        """Return the rows of the sequences that end in this step; vLLM copies them to the CPU."""
        names: Sequence[str] = input_batch.req_ids
        lengths = prompt_lens[input_batch.idx_mapping_np]
        firsts = input_batch.num_computed_prefill_tokens_np
        counts = input_batch.num_scheduled_tokens
        scheduled = [
            ScheduledTokens(name, int(first), int(count), int(offset))
            for name, first, count, offset in zip(
                names, firsts, counts, input_batch.query_start_loc_np, strict=False
            )
            if name in self._rows
        ]
        self._rows.compute(hidden_states, scheduled)
        ends = {name: int(end) for name, end in zip(names, lengths, strict=True)}
        return {
            tokens.request_id: _output(*self._rows.pop(tokens.request_id))
            for tokens in scheduled
            if tokens.first + tokens.count >= ends[tokens.request_id]
        }

    def compute_prompt_token_id_logprobs(self, *_: object) -> dict[str, Tensor]:
        """Return nothing: candidates are a part of ``compute_prompt_logprobs``."""
        return {}


def _unwrap_head(model: Any) -> None:
    """Compute logits without LoRA, whose layer expects the sampled tokens of a step only.

    Adapters of the head are rejected (``startup``).
    """
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if type(child).__name__ == "LogitsProcessorWithLoRA":
                setattr(module, name, child.base_layer)


def _has_parameters(owner: object, method: str, names: list[str]) -> bool:
    function = getattr(owner, method, None)
    return function is not None and [*signature(function).parameters] == names


def _output(ids: Tensor, logprobs: Tensor, ranks: Tensor) -> Any:
    from vllm.v1.outputs import LogprobsTensors  # pyright: ignore[reportMissingImports]

    return LogprobsTensors(ids, logprobs, ranks)
