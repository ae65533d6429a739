"""``UpdateGuard``: which gradients are not followed, and when that happens too often."""

import logging
import math

from mopd_protocol.errors import DataError
from mopd_trainer.config import StudentConfig
from mopd_trainer.measurements import Metrics

logger = logging.getLogger(__name__)


class UpdateGuard:
    """Judges each step's loss and gradient before the weights are changed by them.

    A step that is left out is counted in its line of the journal. Its prompts are not taken again.
    """

    def __init__(self, config: StudentConfig) -> None:
        self._config = config
        self._skipped_in_a_row = 0

    def judge(self, *, loss: float, norm: float, step: int) -> Metrics:
        """``update/skipped_nonfinite`` and ``update/skipped_grad_norm``: 1 where the step is not to
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
            self._skip(found)
        return {
            "update/skipped_nonfinite": float(not finite),
            "update/skipped_grad_norm": float(too_large),
        }

    def _skip(self, found: str) -> None:
        self._skipped_in_a_row += 1
        limit = self._config.max_skipped_in_a_row
        if self._skipped_in_a_row > limit:
            raise DataError(
                f"{found}, after {limit} steps in a row that were left out; nothing was changed: "
                "lower student.learning_rate, or raise student.skip_grad_norm_above or "
                "student.max_skipped_in_a_row"
            )
        logger.warning("%s; the step is left out (%d in a row)", found, self._skipped_in_a_row)
