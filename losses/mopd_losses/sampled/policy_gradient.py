"""Policy-gradient distillation: the teacher's opinion of the sampled token as its advantage.

For a token ``x`` drawn from ``mu`` (the student when it wrote, with its temperature and top-p), the
student ``p`` of now and the teacher ``t``:

    d    = ln p(x) - ln t(x)                            the k1 estimate; the advantage is -d
    rho  = min(p(x) / mu(x), max_ratio)                 importance correction
    loss = sg(rho * d) * p(x) / sg(p(x))                gradient: rho * d * grad ln p(x)

``sg`` is a constant of the gradient. Where the ratio is not clipped the expected gradient over
``x ~ mu`` is exactly that of the slot's reverse KL, for any ``mu`` that may draw whatever ``p``
does (not top-p below 1). The score ``grad ln p(x)`` has mean zero under ``p``: a baseline that does
not depend on ``x`` changes no expected gradient, and ``d`` differentiated as it stands (k1 as a
loss) has none at all. Only each token's own slot is credited, none before it.
(losses: section 4.9; Thinking Machines' on-policy distillation, slime, prime-rl.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.loss_output import LossOutput
from mopd_losses.core.span_targets import SpanTargets, span_targets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.sampled.sampled_tokens import sampled_tokens


@dataclass(frozen=True, eq=False)
class PolicyGradientLoss:
    """``policy_gradient`` with its settings: a ``Loss``."""

    max_ratio: float = 2.0

    def targets(
        self, comparisons: Sequence[AlignedPair], slot_offsets: Sequence[int]
    ) -> SpanTargets:
        """See ``Loss``."""
        return span_targets(comparisons, slot_offsets)

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``."""
        return policy_gradient(student, targets, max_ratio=self.max_ratio)


def policy_gradient(
    student: StudentLogprobs, targets: SpanTargets, *, max_ratio: float = 2.0
) -> LossOutput:
    """Nats per student token: the importance-weighted log-ratio, with a policy gradient.

    Its mean over samples estimates reverse KL, so it may be negative for a single token.

    Args:
        targets: of a teacher that scored at temperature 1.
        max_ratio: upper limit of ``p / mu``. A clipped token keeps its direction, with less weight.

    Returns:
        ``measured``: ``log_ratio`` (d), ``importance_ratio`` before clipping and ``clipped`` (0 or
        1) for each compared token, and ``ruled_out`` (0 or 1) for each one-to-one span.
    """
    tokens = sampled_tokens(student, targets)
    now = tokens.student.detach()
    log_ratios = tokens.log_ratios.detach()
    ratios = (now - tokens.sampled).exp()
    # e^(x - sg(x)) is one, and its gradient is that of x.
    values = ratios.clamp_max(max_ratio) * log_ratios * (tokens.student - now).exp()
    return LossOutput(
        student.zeros().index_add(0, tokens.slots, values),
        {
            "log_ratio": log_ratios,
            "importance_ratio": ratios,
            "clipped": (ratios > max_ratio).to(ratios.dtype),
            "ruled_out": tokens.ruled_out,
        },
    )
