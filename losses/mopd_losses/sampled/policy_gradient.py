"""Policy-gradient distillation: the teacher's log-probability of the sampled token as advantage.

For a token ``x`` drawn from ``mu`` (the student at sampling time, with temperature and top-p), the
current student ``p`` and the teacher ``t``:

    d    = ln p(x) - ln t(x)                            the k1 estimate; the advantage is -d
    rho  = min(p(x) / mu(x), max_ratio)                 importance correction
    loss = sg(rho * d) * p(x) / sg(p(x))                gradient: rho * d * grad ln p(x)

``sg`` is stop-gradient. Where the ratio is not clipped the expected gradient over ``x ~ mu`` is
exactly that of the position's reverse KL, for any ``mu`` with the support of ``p`` (not top-p below
1). ``grad ln p(x)`` has mean zero under ``p``: a baseline that does not depend on ``x`` changes no
expected gradient, and the plain gradient of ``d`` (k1 as a loss) has mean zero. Only the token's
own position gets credit, none before it.
(losses: section 4.9; Thinking Machines' on-policy distillation, slime, prime-rl.)
"""

from dataclasses import dataclass

from mopd_losses.core.compared_tokens import compared_positions
from mopd_losses.core.loss import LossOutput
from mopd_losses.core.span_targets import SpanLoss, SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.sampled.sampled_tokens import sampled_tokens


@dataclass(frozen=True, eq=False)
class PolicyGradientLoss(SpanLoss):
    """The importance-weighted log-ratio with a policy gradient: a ``Loss``.

    The mean over samples estimates reverse KL, so the value of one token may be negative. Needs
    scores at temperature 1. ``measured``: ``log_ratio`` (d), ``importance_ratio`` before clipping
    and ``clipped`` (0 or 1) for each compared token, and ``ruled_out`` (0 or 1) for each one-to-one
    span.

    Args:
        max_ratio: upper limit of ``p / mu``. A clipped token keeps its direction, with less weight.
    """

    max_ratio: float = 2.0

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``."""
        tokens = sampled_tokens(student, targets)
        current = tokens.student.detach()
        log_ratios = tokens.log_ratios.detach()
        ratios = (current - tokens.sampled).exp()
        # e^(x - sg(x)) is one, and its gradient is that of x.
        values = ratios.clamp_max(self.max_ratio) * log_ratios * (tokens.student - current).exp()
        return LossOutput(
            student.zeros().index_add(0, tokens.positions, values),
            compared_positions(student, tokens.positions),
            {
                "log_ratio": log_ratios,
                "importance_ratio": ratios,
                "clipped": (ratios > self.max_ratio).to(ratios.dtype),
                "ruled_out": tokens.ruled_out,
            },
        )
