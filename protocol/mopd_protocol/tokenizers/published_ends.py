"""``published_ends``: the tokens that end a completion by a model's published settings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from mopd_protocol.errors import ConfigError

#: Files that name the ids; the first one that exists decides.
_SETTINGS = ("generation_config.json", "config.json")


def published_ends(
    cached_file: Callable[..., Any], model: str, revision: str | None = None
) -> tuple[int, ...]:
    """Return the ids that end a completion by a model's generation settings; empty if unknown.

    Args:
        cached_file: of ``transformers.utils.hub``.
        model: folder or hub id.
        revision: hub commit, branch or tag.

    Raises:
        ConfigError: if the settings are no JSON object.
    """
    for name in _SETTINGS:
        path = cached_file(
            str(Path(model).expanduser()),
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is not None:
            return end_ids(_settings(Path(path)).get("eos_token_id"))
    return ()


def _settings(path: Path) -> dict[str, object]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{path}: invalid JSON: {error}. Correct the file.", key="model"
        ) from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: not a JSON object. Correct the file.", key="model")
    return cast(dict[str, object], settings)


def end_ids(eos_token_id: object) -> tuple[int, ...]:
    """Return the ids of a setting ``eos_token_id``: none, one, or a list."""
    ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    return tuple(each for each in ids if isinstance(each, int))
