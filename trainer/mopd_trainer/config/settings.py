"""Base class of all sections of a run's settings, the mark for incidental settings, and the
weights of tokens."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from mopd_protocol.errors import ConfigError

T = TypeVar("T")

#: What counts the same in the average of a step's loss.
LossAverage = Literal["tokens", "samples", "teachers"]


@dataclass(frozen=True)
class IncidentalMark:
    """Metadata of a field that is not part of the run's fingerprint."""


#: Type of a setting that does not change what is trained: paths, speed, memory, logging. A run may
#: be resumed with a different value.
Incidental = Annotated[T, IncidentalMark()]


class Settings(BaseModel):
    """A frozen section of settings; unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ImportanceConfig(Settings):
    """Importance weights of sampled tokens: the teacher's probability of the text before a token,
    in any tokens and at the temperature of the sample, divided by that with which the student
    sampled it, at most 1.
    """

    least: float | None = Field(default=None, gt=0, le=1)
    """Least weight of a token; 1: every token weighs the same. Default: 0.1, or 1 in a run with a
    loss of the sampled tokens (``policy_gradient``, ``k2``, ``k3``), whose gradient weights would
    bias."""
    discount: float = Field(default=0.5, ge=0, le=1)
    """Factor on the log-ratio of earlier text at each token: with 0.5 the last few tokens count,
    with 0.9 about ten, with 1 the whole completion."""

    @property
    def least_weight(self) -> float:
        """Least weight of a token, if it has weights."""
        return 0.1 if self.least is None else self.least


#: No importance weights.
UNWEIGHTED = ImportanceConfig(least=1)


def invalid(key: str, problem: str) -> ConfigError:
    """Return the error of a validator; ``key`` is relative to the validated section."""
    return ConfigError(f"{key}: {problem}", key=key)
