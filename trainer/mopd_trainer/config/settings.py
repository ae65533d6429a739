"""Base class of all sections of a run's settings, and the mark for incidental settings."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

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


def invalid(key: str, problem: str) -> ConfigError:
    """Return the error of a validator; ``key`` is relative to the validated section."""
    return ConfigError(f"{key}: {problem}", key=key)
