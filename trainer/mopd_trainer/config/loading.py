"""Reads a run's YAML and its ``a.b=c`` overrides; OmegaConf merges, pydantic decides."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from mopd_protocol.errors import ConfigError
from mopd_protocol.runtime.atomic_file import replacing
from mopd_trainer.config.run import RunConfig


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked configuration of a run.

    Raises:
        ConfigError: everything that is wrong, with the keys it is wrong at.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected a run's YAML")
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} has no '='; expected key=value")
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise ConfigError(f"{path}: found a list, expected keys and values")
        merged = OmegaConf.merge(loaded, OmegaConf.from_dotlist(list(overrides)))
        values = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError, TypeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    return parse_run(values, source=str(path))


def parse_run(values: Any, *, source: str) -> RunConfig:
    """The configuration in plain data; ``source`` names it in errors.

    Raises:
        ConfigError: as ``load_run``.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        told = [_sentence(dict(problem), values) for problem in error.errors()]
        if len(told) == 1:
            raise ConfigError(f"{source}: {told[0]}") from error
        listed = "".join(f"\n  {sentence}" for sentence in told)
        raise ConfigError(f"{source}: {len(told)} settings cannot be used:{listed}") from error


def write_resolved(config: RunConfig, path: Path) -> None:
    """The resolved configuration as YAML that ``load_run`` reads."""
    with replacing(path, durable=True) as temporary:
        temporary.write_text(OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json"))))


def _sentence(problem: dict[str, Any], values: Any) -> str:
    key = _key(problem["loc"], values)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}; look for a spelling mistake or a wrong indentation"
    if problem["type"] == "missing":
        return f"{key!r} is missing"
    if problem["type"] == "union_tag_not_found":
        return f"{key!r} is {problem['input']!r}, without {problem['ctx']['discriminator']}; add it"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return f"{key!r} is {problem['input']!r}: {problem['msg']}"


def _key(location: Sequence[str | int], values: Any) -> str:
    """The dotted key of what is wrong, as the user would write it: without the parts by which
    pydantic names the alternatives that it tried there."""
    found: list[str] = []
    last = len(location) - 1
    for at, part in enumerate(location):
        if isinstance(values, dict) and (part in values or at == last):
            found.append(str(part))
            values = values.get(part)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        elif isinstance(values, list | tuple) and isinstance(part, int):
            found.append(str(part))
            values = values[part] if part < len(values) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return ".".join(found)
