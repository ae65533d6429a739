"""Teacher services for TRL's trainers, without vLLM in the trainer's environment.

``ServiceLoss`` goes in front of any trainer of TRL, and ``install_client`` is for TRL's own
``ServerDistillationTrainer``. ``AsyncDistillationTrainer`` needs neither: a service has its route.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mopd.integrations.service_scorer import ServiceScorer, sampled_logprobs
from mopd.integrations.tail_loss import tail_divergence
from mopd_client.transport.background_loop import BackgroundLoop
from mopd_protocol.errors import ConfigError
from mopd_protocol.topk_logprobs import TopKLogprobs


class TeacherService:
    """A teacher at an address, with the methods of TRL's ``VLLMClient`` that score.

    Args:
        base_url: address of the teacher, or the addresses of its replicas.
        top_k: entries per token, for ``ServiceLoss``.
        connection_timeout: seconds after which a request fails; those to a teacher that is
            starting are retried until then, and at least for a minute.
        api_key: by default, the variable ``MOPD_TEACHER_KEY``.

    Raises:
        ConfigError: on an invalid address or key.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        *,
        top_k: int = 64,
        connection_timeout: float = 300.0,
        api_key: str | None = None,
    ) -> None:
        self.top_k = top_k
        self._scorer = ServiceScorer(
            base_url, loss="tail", api_key=api_key, deadline_seconds=max(connection_timeout, 60.0)
        )
        self._loop = BackgroundLoop("teacher service", self._scorer.aclose)

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        first: Sequence[int],
        top_k: int,
        temperature: float,
    ) -> list[TopKLogprobs]:
        """See ``ServiceScorer.score``."""
        call = self._scorer.score(sequences, first, top_k=top_k, temperature=temperature)
        return self._loop.run(call)

    def get_sequence_logprobs(
        self,
        sequences: list[list[int]],
        prompt_lengths: list[int],
        top_logprobs: int = 100,
        temperature: float = 1.0,
        **unused: object,
    ) -> dict[str, list[Any]]:
        """Return what TRL's ``VLLMClient.get_sequence_logprobs`` returns; errors as ``score``."""
        scores = self.score(sequences, prompt_lengths, top_logprobs, temperature)
        starts = zip(sequences, prompt_lengths, strict=True)
        return {
            "logprobs": [topk.logprobs.tolist() for topk in scores],
            "logprob_token_ids": [np.maximum(topk.ids, 0).tolist() for topk in scores],
            "actual_logprobs": [sampled_logprobs(topk) for topk in scores],
            "actual_token_ids": [[[token] for token in ids[start:]] for ids, start in starts],
        }

    def close(self) -> None:
        """Close the connections; a second call has no effect."""
        self._loop.close()


def install_client() -> None:
    """Let a ``ServerDistillationTrainer`` that is created later use a ``TeacherService``.

    TRL's own client raises ImportError without vLLM.
    """
    client: Any = import_module("trl.generation.vllm_client")
    client.VLLMClient = TeacherService


class ServiceLoss:
    """Base class in front of a trainer of TRL: its loss from the top-k and tail of a service.

    ``class Trainer(ServiceLoss, DistillationTrainer): teacher = TeacherService(...)``. The trainer
    keeps its ``beta`` (0 without one: forward KL; 1: reverse KL; a Jensen-Shannon divergence
    between), ``temperature``, samples and averages. It logs ``teacher_mass``, the mean mass of the
    top-k.
    """

    teacher: TeacherService
    loss_is_scaled_for_ga = True
    args: Any
    accelerator: Any
    current_gradient_accumulation_steps: int

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss of a batch; see ``compute_loss`` of transformers' ``Trainer``."""
        ids, real, trained = _tokens(inputs)
        outputs = model(input_ids=ids, attention_mask=real.long(), use_cache=False)
        temperature = float(getattr(self, "temperature", 1.0))
        entries, logprobs = self._targets(ids, real, trained, temperature)
        values, _, masses = tail_divergence(
            outputs.logits[:, :-1][trained[:, 1:]],
            entries,
            logprobs,
            beta=float(getattr(self, "beta", 0.0)),
            temperature=temperature,
        )
        metrics: Any = getattr(self, "_metrics", None)
        if metrics is not None and len(masses):
            mode = "train" if model.training else "eval"
            metrics[mode]["teacher_mass"].append(masses.mean().item())
        if model.training and inputs.get("num_items_in_batch") is not None:
            # The number of sampled tokens: transformers counts before they are sampled.
            items = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        elif num_items_in_batch is not None:
            devices = self.accelerator.num_processes
            items = num_items_in_batch / (devices if self.args.average_tokens_across_devices else 1)
        else:
            steps = self.current_gradient_accumulation_steps if model.training else 1
            items = max(len(values), 1) * steps
        loss = values.sum() / items
        return (loss, outputs) if return_outputs else loss

    def _targets(
        self, ids: Tensor, real: Tensor, trained: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """[trained, k] each: ids and log-probabilities for the trained tokens, row by row."""
        rows = [row for row in range(len(ids)) if trained[row].any()]
        masks = [trained[row][real[row]].cpu().numpy() for row in rows]
        first = [int(mask.argmax()) for mask in masks]
        sequences = [ids[row][real[row]].tolist() for row in rows]
        scores = self.teacher.score(sequences, first, self.teacher.top_k, temperature)
        parts = [mask[start:] for mask, start in zip(masks, first, strict=True)]
        none = np.empty((0, self.teacher.top_k))
        pairs = list(zip(scores, parts, strict=True))
        entries = np.concatenate([none, *(topk.ids[part] for topk, part in pairs)])
        logprobs = np.concatenate([none, *(topk.logprobs[part] for topk, part in pairs)])
        return torch.tensor(entries).long().to(ids.device), torch.tensor(logprobs).to(ids.device)


def _tokens(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, length] each: the ids, which tokens are real, and which are trained."""
    if "completion_ids" in inputs:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        prompt, completion = inputs["prompt_mask"].bool(), inputs["completion_mask"].bool()
        trained = completion & inputs.get("tool_mask", completion).bool()
        real = torch.cat([prompt, completion], dim=1)
        trained = torch.cat([torch.zeros_like(prompt), trained], dim=1)
    elif "attention_mask" in inputs and "labels" in inputs:
        ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
        trained = real & (inputs["labels"] != -100)
    else:
        raise ConfigError(
            f"ServiceLoss: batch without masks of its sequences (found {', '.join(inputs)}, "
            "expected completion_mask, or attention_mask and labels). Turn off packing.",
            key="packing",
        )
    first = torch.arange(ids.shape[1], device=ids.device) == real.int().argmax(1, keepdim=True)
    return ids, real, trained & ~first  # no row predicts the first token
