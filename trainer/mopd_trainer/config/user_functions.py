"""Functions of the user, named ``python:module:function``."""

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mopd_protocol.errors import ConfigError

_NAME = re.compile(r"python:[\w.]+:\w+")


def is_function_name(text: str) -> bool:
    """Return True for ``python:module:function``."""
    return _NAME.fullmatch(text) is not None


def import_function(name: str, *, key: str) -> Any:
    """Import ``python:module:function``, from the current folder too.

    Args:
        key: setting with the name.

    Raises:
        ConfigError: if it cannot be imported.
    """
    _, module, attribute = name.split(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}: {name!r} cannot be imported: {error}", key=key) from error
