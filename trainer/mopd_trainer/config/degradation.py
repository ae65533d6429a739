"""``DegradationConfig``: when a degrading student is reported, and when the run ends."""

from typing import Annotated

from pydantic import Field

from mopd_trainer.config.settings import Settings

_Share = Annotated[float, Field(ge=0, le=1)]


class DegradationConfig(Settings):
    """Thresholds of the warnings about a degrading student, and of the end of the run.

    A metric's mean over the last ``window`` steps is compared with its best mean over as many
    consecutive steps of the run, and over its first half as many; what differs by less than twice
    the standard errors of the means is not reported. Each warning is logged once.
    """

    window: int = Field(default=10, ge=1)
    """Steps of a mean."""
    warn_compared_share: _Share = 0.8
    """Warn if the share of tokens that are compared, of the run or of a teacher, falls below this
    fraction of its best."""
    stop_compared_share: _Share = 0.5
    """End the run below this fraction."""
    warn_invalid_bytes: _Share = 0.01
    """Warn if the share of sampled bytes that are not valid UTF-8 exceeds twice its lowest by this
    much."""
    stop_invalid_bytes: _Share = 0.1
    """End the run above it."""
    warn_divergence: float = Field(default=1.3, gt=1)
    """Warn if a teacher's ``reverse_kl_estimate`` exceeds its lowest by this factor and 0.25 nats:
    the student's samples became less likely under the teacher, even if the loss falls."""
    stop_divergence: float = Field(default=2.0, gt=1)
    """End the run if it exceeds its lowest by this factor and 1 nat."""
    warn_length: _Share = 0.5
    """Warn if the mean length of a sampled completion falls below this fraction of its longest
    while the teachers find the ends less likely than then, and on average less than one in ten."""
    stop_length: _Share = 0.2
    """End the run below this fraction, if the same is true."""
    warn_entropy: _Share = 0.1
    """Warn if the student's entropy falls below this fraction of its highest and below the same
    fraction of the teachers' on the same text. Does not end the run."""
