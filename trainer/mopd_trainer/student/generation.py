"""Sampling from the student's logits: the distribution, the drawn ids and their logprobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, TopPLogitsWarper

from mopd_protocol.errors import TrainingError
from mopd_protocol.tokenizers.published_ends import end_ids
from mopd_trainer.config.run import RolloutConfig


@dataclass(frozen=True, eq=False)
class Generation:
    """A sampled completion: ids up to and including the ending token, and their logprobs."""

    token_ids: list[int]
    logprobs: list[float]  # nats, under the distribution that was sampled from
    topk_ids: np.ndarray[Any, Any] | None = None  # int32 [tokens, k], before top-p; -1 if missing
    entropies: np.ndarray[Any, Any] | None = None  # [tokens], nats

    def first(self, tokens: int) -> "Generation":
        """Return the first tokens."""
        topk_ids = None if self.topk_ids is None else self.topk_ids[:tokens]
        entropies = None if self.entropies is None else self.entropies[:tokens]
        return Generation(self.token_ids[:tokens], self.logprobs[:tokens], topk_ids, entropies)


class BehaviourPolicy(LogitsProcessor):
    """Sample the next id under the rollout settings, and keep its logprob and the top-k ids.

    The processed scores have one finite entry per row, the drawn id; a ``[steps, batch,
    vocabulary]`` tensor is never allocated.

    Args:
        real_ids: bool [logit width], False for rows of the head without a token.
        keep_topk: most likely ids to keep at each step, before temperature and top-p.
        keep_entropies: keep the entropy of each step's distribution.
    """

    def __init__(
        self,
        real_ids: Tensor,
        settings: RolloutConfig,
        draws: torch.Generator,
        *,
        keep_topk: int,
        keep_entropies: bool,
    ) -> None:
        self._real_ids = real_ids
        self._temperature = settings.temperature
        self._nucleus = TopPLogitsWarper(settings.top_p) if settings.top_p < 1 else None
        self._draws = draws
        self._keep_topk = min(keep_topk, int(real_ids.sum()))
        self._keep_entropies = keep_entropies
        self._topk_ids: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._entropies: list[Tensor] = []
        self._not_finite = torch.zeros((), dtype=torch.bool, device=real_ids.device)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return scores of which only the drawn id is finite."""
        scores = scores.float().masked_fill(~self._real_ids, -torch.inf)
        if self._keep_topk:
            self._topk_ids.append(scores.topk(self._keep_topk, dim=-1).indices.int().cpu())
        if self._temperature > 0:
            scores = scores / self._temperature
        if self._nucleus is not None:
            scores = self._nucleus(input_ids, scores)
        logprobs = scores.log_softmax(dim=-1)
        # One NaN or infinity makes the whole row NaN. Checked once after generation: a check per
        # token would synchronize the device, and sampling from such a row may abort the process.
        not_finite = logprobs[:, :1].isnan()
        self._not_finite |= not_finite.any()
        drawn = self._draw(scores.masked_fill(not_finite, 0.0))
        self._logprobs.append(logprobs.gather(1, drawn)[:, 0])
        if self._keep_entropies:
            self._entropies.append(-(logprobs.exp() * logprobs.clamp_min(-1e4)).sum(dim=1))
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)

    def require_finite(self) -> None:
        """Raise TrainingError if any logits were not finite."""
        if self._not_finite:
            raise TrainingError(
                "student: logits are not finite, so no token can be sampled: the weights have "
                "diverged. Lower student.learning_rate, and resume from an earlier checkpoint "
                "with resume_from_checkpoint.",
                key="student.learning_rate",
            )

    def generations(self, ids: Tensor, ending: Sequence[int]) -> list[Generation]:
        """Return the completion of each row, up to its first ending token.

        Args:
            ids: int64 [batch, steps], the drawn ids and padding behind an ending one.
            ending: ids that end a completion.
        """
        logprobs = torch.stack(self._logprobs, dim=1).tolist()
        topk_ids = torch.stack(self._topk_ids, dim=1).numpy() if self._topk_ids else None
        entropies = torch.stack(self._entropies, dim=1).cpu().numpy() if self._entropies else None
        ended = np.isin(ids.numpy(), ending)
        lengths = np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, ended.shape[1])
        return [
            Generation(
                own,
                logprobs[row],
                None if topk_ids is None else topk_ids[row],
                None if entropies is None else entropies[row],
            ).first(int(lengths[row]))
            for row, own in enumerate(ids.tolist())
        ]

    def _draw(self, scores: Tensor) -> Tensor:
        """Return int64 [batch, 1]."""
        if self._temperature == 0:
            return scores.argmax(dim=-1, keepdim=True)
        return torch.multinomial(scores.softmax(dim=-1), 1, generator=self._draws)


def with_ends(settings: Any, ending: Sequence[int]) -> Any:
    """Set the ids that end a completion in a model's generation settings, if these have others."""
    if {*end_ids(settings.eos_token_id)} != {*ending}:
        settings.eos_token_id = [*ending] if ending[1:] else ending[0]
    return settings


def left_padded(prompts: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask, int64 [prompts, longest]: completions begin in one column."""
    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), longest), padding)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, longest - len(prompt) :] = 1
    return input_ids, attention_mask
