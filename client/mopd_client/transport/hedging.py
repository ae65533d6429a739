"""``Hedging``: when a request that is slow to be answered is sent a second time, elsewhere."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mopd_protocol.errors import ConfigError

#: Answers before a quantile of their latencies is believed, and how many are remembered.
_LEAST_ANSWERS = 20
_REMEMBERED_ANSWERS = 500


@dataclass(frozen=True)
class Hedging:
    """Sends a second request after a number of seconds, or after a quantile of past latencies.

    Raises:
        ConfigError: when both are given, or one that cannot be.
    """

    after_seconds: float | None = None
    after_quantile: float | None = None

    def __post_init__(self) -> None:
        if self.after_seconds is not None and self.after_quantile is not None:
            raise ConfigError(
                "hedge_after_seconds and hedge_after_quantile are both set; expected one of them"
            )
        if self.after_seconds is not None and not self.after_seconds > 0:
            raise ConfigError(f"hedge_after_seconds is {self.after_seconds}; expected more than 0")
        if self.after_quantile is not None and not 0 < self.after_quantile < 1:
            raise ConfigError(
                f"hedge_after_quantile is {self.after_quantile}; expected it between 0 and 1"
            )


@dataclass
class Latencies:
    """Seconds of a teacher's last answered attempts."""

    seconds: deque[float] = field(default_factory=lambda: deque[float](maxlen=_REMEMBERED_ANSWERS))

    def hedge_delay(self, hedging: Hedging) -> float | None:
        """Seconds after which to send a second request; None for never, or not yet known."""
        if hedging.after_quantile is None:
            return hedging.after_seconds
        if len(self.seconds) < _LEAST_ANSWERS:
            return None
        return quantile(sorted(self.seconds), hedging.after_quantile)


def quantile(ordered: Sequence[float], q: float) -> float:
    """The least value that a share ``q`` of increasing ``ordered`` does not exceed."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
