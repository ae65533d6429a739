"""``UpdateGuard``: skip unusable steps, and end the run after too many."""

import logging
import math

from mopd_protocol.errors import TrainingError
from mopd_trainer.config.run import StudentConfig
from mopd_trainer.metrics.step_metrics import Metrics

logger = logging.getLogger(__name__)


class UpdateGuard:
    """Check each step before its update.

    A skipped step is counted in the journal; its prompts are not sampled again.
    """

    def __init__(self, config: StudentConfig) -> None:
        self._config = config
        self._skipped_in_a_row = 0

    def check(self, *, loss: float, norm: float, step: int) -> Metrics:
        """Return ``update/skipped_nonfinite``, ``…_grad_norm`` and ``…_empty``: 1 for the reason
        to skip the step, else 0.

        Args:
            loss: nats per token.
            norm: of the gradient, before clipping.
            step: counted from 0.

        Raises:
            TrainingError: when the settings end the run at such a step, or too many were skipped
                in a row.
        """
        finite = math.isfinite(loss) and math.isfinite(norm)
        limit = self._config.skip_grad_norm_above
        too_large = finite and limit is not None and norm > limit
        problem = f"step {step + 1}: gradient norm {norm:.4g}, loss {loss:.4g} nats per token"
        if not finite and self._config.on_nonfinite == "stop":
            raise TrainingError(
                f"{problem}; the weights are unchanged. Lower student.learning_rate, inspect the "
                "last completions, or skip such steps with student.on_nonfinite=skip.",
                key="student.on_nonfinite",
            )
        if finite and not too_large:
            self._skipped_in_a_row = 0
        else:
            self._skip(
                problem,
                "Lower student.learning_rate, or raise student.skip_grad_norm_above or "
                "student.max_skipped_in_a_row.",
            )
        return _reasons(nonfinite=not finite, grad_norm=too_large)

    def check_empty(self, dropped: Metrics, *, step: int) -> Metrics:
        """Return the metrics of ``check`` for a step without samples.

        Args:
            dropped: ``dropped/…``, samples by reason.
            step: counted from 0.

        Raises:
            TrainingError: when too many steps were skipped in a row.
        """
        counts = {k.removeprefix("dropped/"): n for k, n in dropped.items() if "dropped/" in k}
        reasons = ", ".join(f"{reason} {n:.0f}" for reason, n in counts.items())
        self._skip(
            f"step {step + 1}: every sample was dropped ({reasons})",
            "Fix the cause, or raise student.max_skipped_in_a_row to wait longer.",
        )
        return _reasons(empty=True)

    def _skip(self, problem: str, fix: str) -> None:
        self._skipped_in_a_row += 1
        limit = self._config.max_skipped_in_a_row
        if self._skipped_in_a_row > limit:
            raise TrainingError(
                f"{problem}, after {limit} skipped steps in a row; the weights are unchanged. "
                f"{fix}",
                key="student.max_skipped_in_a_row",
            )
        logger.warning("%s; step skipped (%d in a row)", problem, self._skipped_in_a_row)


def _reasons(*, nonfinite: bool = False, grad_norm: bool = False, empty: bool = False) -> Metrics:
    return {
        "update/skipped_nonfinite": float(nonfinite),
        "update/skipped_grad_norm": float(grad_norm),
        "update/skipped_empty": float(empty),
    }
