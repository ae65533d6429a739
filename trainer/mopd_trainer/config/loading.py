"""``load_run``: settings of a run from YAML, overrides and keyword arguments.

OmegaConf merges and interpolates; pydantic validates.
"""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from mopd_protocol.errors import ConfigError
from mopd_protocol.runtime.atomic_file import replacing
from mopd_trainer.config.foreign_settings import counterpart_of
from mopd_trainer.config.run import RunConfig


def load_run(
    run: str | Path | RunConfig, overrides: Sequence[str] = (), **settings: Any
) -> RunConfig:
    """Load and validate the settings of a run.

    Args:
        run: YAML file, or settings to change.
        overrides: ``"teachers.math.top_k=32"``, dots for nesting; ``"teachers={}"`` empties a
            section, ``"~teachers.code"`` removes a key.
        settings: overrides as keyword arguments, dictionaries for nesting
            (``teachers={"math": {"top_k": 32}}``); an empty dictionary empties a section.

    Raises:
        ConfigError: for an unreadable file or invalid settings; ``key`` is the (first) setting.
    """
    source = "settings" if isinstance(run, RunConfig) else str(run)
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise ConfigError(
                f"override {override!r}: '=' not found, expected KEY=VALUE or ~KEY", key=override
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
        for override in overrides:
            if override.startswith("~"):
                _remove(loaded, override[1:])
            else:
                loaded = _merged(loaded, OmegaConf.from_dotlist([override]))
        values = OmegaConf.to_container(_merged(loaded, OmegaConf.create(settings)), resolve=True)
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


def _merged(values: Any, changes: DictConfig) -> Any:
    """Merge changes into values; an empty section of the changes replaces a section."""
    merged: Any = OmegaConf.merge(values, changes)
    for path in _empty_sections(OmegaConf.to_container(changes)):
        section = merged
        for key in path[:-1]:
            section = section[key]
        section[path[-1]] = {}
    return merged


def _empty_sections(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(values, dict):
        if path and not values:
            yield path
        for key, value in values.items():  # pyright: ignore[reportUnknownVariableType]
            yield from _empty_sections(value, (*path, str(key)))  # pyright: ignore[reportUnknownArgumentType]


def _remove(values: Any, key: str) -> None:
    """Remove a dotted key in place."""
    *path, last = key.split(".")
    section = values
    for name in path:
        section = section.get(name) if isinstance(section, DictConfig) else None
    if not isinstance(section, DictConfig) or last not in section:
        raise ConfigError(f"override '~{key}': {key} not found. Remove the override.", key=key)
    del section[last]


def _problem(details: dict[str, Any], values: Any) -> tuple[str, str]:
    """Return the dotted key of a pydantic error, and a message that begins with the key."""
    key, kind = _key(details["loc"], values), details["type"]
    if kind == "value_error":
        error = details["ctx"]["error"]
        if not isinstance(error, ConfigError):
            return key, f"{key}: {error}"
        prefix = f"{key}." if key else ""
        return f"{prefix}{error.key or ''}".strip("."), f"{prefix}{error}"
    if kind == "extra_forbidden":
        if counterpart := counterpart_of(key):
            return key, f"{key}: unknown setting {counterpart}. Rename or remove it."
        return key, f"{key}: unknown setting{_suggestion(key)}. Check spelling and indentation."
    if kind == "missing":
        return key, f"{key}: missing, but required"
    if kind == "union_tag_not_found":
        return key, f"{key}: {details['ctx']['discriminator']} is missing ({_found(details)})"
    return key, f"{key}: {details['msg']} ({_found(details)})"


def _found(details: dict[str, Any]) -> str:
    return f"found {details['input']!r}"


def _suggestion(key: str) -> str:
    """Return the closest setting of the section, or the same or closest one elsewhere."""
    *section, name = key.split(".")
    paths = [path.split(".") for path in known_settings()]
    own = {path[-1] for path in paths if _matches(path[:-1], section)}
    close = get_close_matches(name, sorted(own), n=1, cutoff=0.6)
    if not close:
        others = {path[-1]: path for path in sorted(paths, key=len, reverse=True)}
        names = get_close_matches(name, sorted(others), n=1, cutoff=0.7)
        close = [".".join(others[each]) for each in names]
    return f", did you mean {close[0]!r}" if close else ""


def _matches(path: Sequence[str], section: Sequence[str]) -> bool:
    return len(path) == len(section) and all(
        own in ("NAME", other) for own, other in zip(path, section, strict=True)
    )


@cache
def known_settings() -> frozenset[str]:
    """Return the dotted keys of all settings, with ``NAME`` for the name of a teacher or set."""
    schema = RunConfig.model_json_schema()
    return frozenset(_schema_paths(schema, schema["$defs"], ""))


def _schema_paths(schema: dict[str, Any], sections: dict[str, Any], prefix: str) -> Iterator[str]:
    if "$ref" in schema:
        schema = sections[schema["$ref"].rpartition("/")[2]]
    for form in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(form, ()):
            yield from _schema_paths(each, sections, prefix)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _schema_paths(schema["additionalProperties"], sections, f"{prefix}NAME.")
    for name, each in schema.get("properties", {}).items():
        yield f"{prefix}{name}"
        yield from _schema_paths(each, sections, f"{prefix}{name}.")


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
