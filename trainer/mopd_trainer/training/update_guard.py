"""``UpdateGuard``: which steps are left out, and when that happens too often."""

import logging
import math

from mopd_protocol.errors import DataError
from mopd_trainer.config.run import StudentConfig
from mopd_trainer.metrics.step_metrics import Metrics

logger = logging.getLogger(__name__)


class UpdateGuard:
    """Judges each step before the weights are changed by it.

    A step that is left out is counted in its line of the journal. Its prompts are not taken again.
    """

    def __init__(self, config: StudentConfig) -> None:
        self._config = config
        self._skipped_in_a_row = 0

    def judge(self, *, loss: float, norm: float, step: int) -> Metrics:
        """``update/skipped_nonfinite``, ``…_grad_norm`` and ``…_empty``: 1 where the step is not to
        be made for that reason, else 0.

        Args:
            loss: nats per token.
            norm: of the gradient, before it is clipped.
            step: counted from 0.

        Raises:
            DataError: where such a step is to end the run, or too many came one after another.
        """
        finite = math.isfinite(loss) and math.isfinite(norm)
        limit = self._config.skip_grad_norm_above
        too_large = finite and limit is not None and norm > limit
        found = f"the gradient of step {step + 1} has norm {norm:.4g}, loss {loss:.4g} nats a token"
        if not finite and self._config.on_nonfinite == "stop":
            raise DataError(
                f"{found}; nothing was changed: lower student.learning_rate, look at the last "
                "completions, or leave such steps out by student.on_nonfinite=skip"
            )
        if finite and not too_large:
            self._skipped_in_a_row = 0
        else:
            self._skip(
                found,
                "lower student.learning_rate, or raise student.skip_grad_norm_above or "
                "student.max_skipped_in_a_row",
            )
        return _reasons(nonfinite=not finite, grad_norm=too_large)

    def judge_empty(self, dropped: Metrics, *, step: int) -> Metrics:
        """The same of a step that has no sample.

        Args:
            dropped: ``dropped/…``, why its samples went.
            step: counted from 0.

        Raises:
            DataError: where too many such steps came one after another.
        """
        reasons = ", ".join(f"{key.partition('/')[2]} {n:.0f}" for key, n in dropped.items())
        self._skip(
            f"every sample of step {step + 1} was dropped ({reasons})",
            "mend what drops them, or raise student.max_skipped_in_a_row to wait for longer",
        )
        return _reasons(empty=True)

    def _skip(self, found: str, remedy: str) -> None:
        self._skipped_in_a_row += 1
        limit = self._config.max_skipped_in_a_row
        if self._skipped_in_a_row > limit:
            raise DataError(
                f"{found}, after {limit} steps in a row that were left out; nothing was changed: "
                f"{remedy}"
            )
        logger.warning("%s; the step is left out (%d in a row)", found, self._skipped_in_a_row)


def _reasons(*, nonfinite: bool = False, grad_norm: bool = False, empty: bool = False) -> Metrics:
    return {
        "update/skipped_nonfinite": float(nonfinite),
        "update/skipped_grad_norm": float(grad_norm),
        "update/skipped_empty": float(empty),
    }
