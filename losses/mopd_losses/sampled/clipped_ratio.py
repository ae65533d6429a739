"""The clipped importance ratio of sampled tokens with an advantage: the estimator of rewards.

For a sampled token ``x`` with advantage ``A``, the current student ``p`` and the distribution
``mu`` that ``x`` was drawn from, both at the sampling temperature:

    rho  = p(x) / mu(x)
    loss = -min(rho * A, clip(rho, 1 - epsilon, 1 + epsilon) * A)

(PPO, arXiv 1707.06347, equation 7; per token as in GRPO, arXiv 2402.03300, without its KL term: the
distillation term takes its place.) With one optimizer step per sampled batch ``rho`` is 1 up to
rounding, and the gradient that of REINFORCE; it clips samples of older weights.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.core.compared_tokens import compared_positions
from mopd_losses.core.loss import LossOutput
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.core.targets import RowTargets


@dataclass(frozen=True, eq=False)
class AdvantageTargets(RowTargets):
    """Sampled tokens at ``positions``, which increase; other positions have loss zero."""

    positions: Int64[Tensor, "rewarded"]
    token_ids: Int64[Tensor, "rewarded"]  # student ids
    sampled_logprobs: Float[Tensor, "rewarded"]  # ln mu(x), nats
    advantages: Float[Tensor, "rewarded"]


@dataclass(frozen=True, eq=False)
class ClippedRatioLoss:
    """The negative clipped surrogate: its gradient raises tokens with a positive advantage.

    The value is in advantages, not nats; its gradient is that of an advantage times nats.
    ``measured``: ``importance_ratio`` and ``clipped`` (1 where the clipped side is the smaller one,
    which has no gradient) of each token.

    Args:
        epsilon: distance from 1 at which the ratio is clipped.
        temperature: at which the tokens were sampled.
    """

    epsilon: float = 0.2
    temperature: float = 1.0

    def __call__(self, student: StudentLogprobs, targets: AdvantageTargets) -> LossOutput:
        """See ``Loss``."""
        logprobs = student.logprobs(
            targets.positions, targets.token_ids, temperature=self.temperature
        )
        advantages = targets.advantages.to(logprobs.dtype)
        ratios = (logprobs - targets.sampled_logprobs.to(logprobs.dtype)).exp()
        free = ratios * advantages
        clipped = ratios.clamp(1 - self.epsilon, 1 + self.epsilon) * advantages
        return LossOutput(
            student.zeros().index_add(0, targets.positions, -torch.minimum(free, clipped)),
            compared_positions(student, targets.positions),
            {
                "importance_ratio": ratios.detach(),
                "clipped": (clipped < free).to(ratios.dtype).detach(),
            },
        )
