"""``load_run``: settings of a run from YAML, overrides and keyword arguments.

OmegaConf merges and interpolates; pydantic validates.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from mopd_protocol.errors import ConfigError
from mopd_protocol.runtime.atomic_file import replacing
from mopd_trainer.config.run import RunConfig


def load_run(
    run: str | Path | RunConfig, overrides: Sequence[str] = (), **settings: Any
) -> RunConfig:
    """Load and validate the settings of a run.

    Args:
        run: YAML file, or settings to change.
        overrides: ``"teachers.math.top_k=32"``, dots for nesting.
        settings: overrides as keyword arguments, dictionaries for nesting
            (``teachers={"math": {"top_k": 32}}``).

    Raises:
        ConfigError: for an unreadable file or invalid settings; ``key`` is the (first) setting.
    """
    source = "settings" if isinstance(run, RunConfig) else str(run)
    for override in overrides:
        if "=" not in override:
            raise ConfigError(
                f"override {override!r}: '=' not found, expected KEY=VALUE", key=override
            )
    try:
        if isinstance(run, RunConfig):
            loaded = OmegaConf.create(run.model_dump(mode="json"))
        elif Path(run).is_file():
            loaded = OmegaConf.load(run)
        else:
            raise ConfigError(f"{source}: file not found, expected the YAML file of a run")
        if not isinstance(loaded, DictConfig):
            raise ConfigError(f"{source}: found a list, expected keys and values")
        merged = OmegaConf.merge(loaded, OmegaConf.from_dotlist(list(overrides)), settings)
        values = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError, TypeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}") from error
    return parse_run(values, source=source)


def parse_run(values: Any, *, source: str) -> RunConfig:
    """Validate the settings of a run given as plain data.

    Args:
        source: name of the settings in error messages.

    Raises:
        ConfigError: for invalid settings; ``key`` is the (first) setting.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems = [_problem(dict(details), values) for details in error.errors()]
        key, first = problems[0]
        if len(problems) == 1:
            raise ConfigError(f"{source}: {first}", key=key) from error
        listing = "".join(f"\n  {message}" for _, message in problems)
        raise ConfigError(
            f"{source}: {len(problems)} invalid settings:{listing}", key=key
        ) from error


def write_resolved(config: RunConfig, path: Path, comments: Sequence[str] = ()) -> None:
    """Save the resolved settings as YAML for ``load_run``, below comments of one line."""
    settings = OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))
    with replacing(path, durable=True) as temporary:
        temporary.write_text("".join(f"# {comment}\n" for comment in comments) + settings)


def _problem(details: dict[str, Any], values: Any) -> tuple[str, str]:
    """Return the dotted key of a pydantic error, and a message that begins with the key."""
    key, kind = _key(details["loc"], values), details["type"]
    if kind == "value_error":
        error = details["ctx"]["error"]
        prefix = f"{key}." if key else ""
        return f"{prefix}{getattr(error, 'key', None) or ''}".strip("."), f"{prefix}{error}"
    if kind == "extra_forbidden":
        return key, f"{key}: unknown setting{_suggestion(key)}. Check spelling and indentation."
    if kind == "missing":
        return key, f"{key}: missing, but required"
    if kind == "union_tag_not_found":
        return key, f"{key}: {details['ctx']['discriminator']} is missing ({_found(details)})"
    return key, f"{key}: {details['msg']} ({_found(details)})"


def _found(details: dict[str, Any]) -> str:
    return f"found {details['input']!r}"


def _suggestion(key: str) -> str:
    schema = RunConfig.model_json_schema()
    sections: list[dict[str, Any]] = [schema, *schema["$defs"].values()]
    names = {name for section in sections for name in section.get("properties", ())}
    matches = get_close_matches(key.rpartition(".")[2], sorted(names), n=1, cutoff=0.7)
    return f", did you mean {matches[0]!r}" if matches else ""


def _key(location: Sequence[str | int], values: Any) -> str:
    """Return the dotted key of a pydantic error location, without the names of union members."""
    parts: list[str] = []
    last = len(location) - 1
    for index, part in enumerate(location):
        if isinstance(values, dict) and (part in values or index == last):
            parts.append(str(part))
            values = values.get(part)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        elif isinstance(values, list | tuple) and isinstance(part, int):
            parts.append(str(part))
            values = values[part] if part < len(values) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return ".".join(parts)
