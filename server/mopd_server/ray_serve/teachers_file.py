"""The YAML file of ``mopd-teacher deploy``: teachers, replicas, and the limits of a request."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass

from mopd_protocol.errors import ConfigError
from mopd_server.engines.registry import AUTO, ENGINES
from mopd_server.options import MAX_SECONDS, NAME
from mopd_server.settings import ListenSettings, TeacherSettings

_STRICT = ConfigDict(extra="forbid")
#: Of the two forms of ``replicas``; pydantic adds them to the location of an error.
_TAGS = ("number", "autoscaling")
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
_Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Autoscaling(BaseModel):
    """Number of replicas by the tokens in their queues."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min: PositiveInt = 1
    max: PositiveInt
    queue_tokens: PositiveInt = 4 * TeacherSettings.max_batch_tokens
    """Tokens in the queues for each replica: with more, replicas are added."""
    upscale_seconds: float = Field(30.0, ge=0, le=MAX_SECONDS)
    """For which more tokens are queued before a replica is added."""
    downscale_seconds: float = Field(600.0, ge=0, le=MAX_SECONDS)
    """For which fewer tokens are queued before a replica is removed."""

    @model_validator(mode="after")
    def _bounds(self) -> "Autoscaling":
        if self.max < self.min:
            raise ValueError(f"max is below min (found {self.max}, expected at least {self.min})")
        return self


Replicas = Annotated[
    Annotated[PositiveInt, Tag(_TAGS[0])] | Annotated[Autoscaling, Tag(_TAGS[1])],
    Discriminator(lambda value: _TAGS[isinstance(value, Mapping | Autoscaling)]),
]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DeployedTeacher(TeacherSettings):
    """A teacher, its replicas, and the resources of each."""

    name: str = Field(pattern=f"^{NAME.pattern}$")
    """A part of the address."""
    replicas: Replicas = 1
    """A fixed number, or ``{min, max, queue_tokens}``."""
    num_gpus: _Share | None = None
    """Accelerators of a replica; default: those that its parallel sizes need, none without any in
    the cluster. A fraction shares one."""
    num_cpus: _Share = 1.0
    """Cores that Ray reserves for a replica."""
    resources: dict[str, _Share] = Field(default_factory=dict)
    """Other resources of a replica that Ray counts, such as ``NPU``."""
    multi_node: bool = False
    """vLLM: one replica may use accelerators of several nodes."""

    @field_validator("*", mode="after")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        # The command line's options have the same bounds; ``num_gpus`` and ``num_cpus`` may be 0.
        if type(value) is int and value <= 0:
            raise ValueError("expected a number above 0")
        return value

    @field_validator("engine")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in (AUTO, *ENGINES):
            raise ValueError(f"unknown engine, expected {AUTO} or one of {', '.join(ENGINES)}")
        return value

    @field_validator("gpu_memory_utilization")
    @classmethod
    def _share(cls, value: float) -> float:
        if not 0 < value <= 1:
            raise ValueError("expected a number above 0, up to 1")
        return value

    @field_validator("key_weights", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        return tuple(value.items()) if isinstance(value, Mapping) else value

    @field_validator("multi_node")
    @classmethod
    def _with_vllm(cls, value: bool, info: ValidationInfo) -> bool:
        engine, copies = info.data.get("engine"), info.data.get("data_parallel_size")
        if value and (engine != "vllm" or copies != 1):
            raise ValueError(
                f"needs engine vllm and data_parallel_size 1 (found {engine} and {copies}): copies "
                "are replicas"
            )
        return value

    @property
    def accelerators(self) -> int:
        """Accelerators that the parallel sizes of a replica need."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def settings(self) -> TeacherSettings:
        """Return the settings of the engine and its limits, as ``mopd-teacher serve`` has them."""
        values = {field.name: getattr(self, field.name) for field in fields(TeacherSettings)}
        values["model"] = _absolute(self.model)
        values["adapter"] = tuple(
            f"{name}={_absolute(folder)}"
            for name, _, folder in (pair.partition("=") for pair in self.adapter)
        )
        if self.multi_node:
            values["vllm_arg"] = (*self.vllm_arg, "distributed_executor_backend=ray")
        return TeacherSettings(**values)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TeachersFile(ListenSettings):
    """Teachers of one file, and the settings of requests that all share."""

    teachers: tuple[DeployedTeacher, ...] = Field(min_length=1)
    port: int = Field(8000, ge=1, le=65535)
    """Port of Ray Serve's proxy, on every node with a replica."""

    @field_validator("teachers")
    @classmethod
    def _unique(cls, teachers: tuple[DeployedTeacher, ...]) -> tuple[DeployedTeacher, ...]:
        names = [teacher.name for teacher in teachers]
        if len(set(names)) < len(names):
            raise ValueError(f"names occur twice (found {', '.join(names)})")
        return teachers

    @field_validator("*", mode="after")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        if type(value) in (int, float) and not 0 < value <= 2**53:
            raise ValueError("expected a number above 0")
        return value

    def listen(self) -> ListenSettings:
        """Return the settings of requests; paths are absolute."""
        values: dict[str, Any] = {}
        for field in fields(ListenSettings):
            value = getattr(self, field.name)
            values[field.name] = value.resolve() if isinstance(value, Path) else value
        return ListenSettings(**values)


def _absolute(path: str) -> str:
    """Return the absolute path of a local folder: replicas start in another working folder."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def load_teachers_file(path: Path) -> TeachersFile:
    """Load and validate a file.

    Raises:
        ConfigError: with the first problem; ``key`` is its setting.
    """
    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"{path}: reading the teachers failed: {problem}", key="file") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: no settings found (expected a list of 'teachers', each with a name and a "
            "model)",
            key="teachers",
        )
    try:
        return TypeAdapter(TeachersFile).validate_python(values)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in details["loc"] if part not in _TAGS)
        problem = details["msg"].removeprefix("Value error, ")
        if details["type"] in _UNKNOWN:
            problem = "unknown setting"
        if details["type"] != "missing" and "found" not in problem:
            problem = f"{problem} (found {str(details['input'])[:80]})"
        raise ConfigError(f"{path}: {key}: {problem}", key=key) from error
