"""Table of engines, their selection and loading.

A new engine is one module and one row of ``ENGINES``. The module defines the two functions of
``EngineModule``; the command line, ``--engine auto`` and the error messages follow from the row.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from mopd_protocol.errors import ConfigError
from mopd_server.settings import TeacherSettings

if TYPE_CHECKING:  # the command line imports this module
    from mopd_protocol.tokenizers.token_table import TokenTable
    from mopd_server.engines.base import AsyncEngine, Engine

AUTO = "auto"


class EngineModule(Protocol):
    """The functions that a module of ``ENGINES`` defines."""

    is_available: Callable[[TeacherSettings], bool]
    """Return whether ``--engine auto`` may select this engine for these settings."""
    load_engine: Callable[[TeacherSettings, "TokenTable"], "Engine | AsyncEngine"]
    """Return the engine with its model loaded; raise ConfigError if that is impossible."""


@dataclass(frozen=True)
class EngineEntry:
    """One engine: a module, imported on use, and the settings that no other engine supports."""

    module: str
    options: tuple[str, ...] = ()


#: Name -> engine, in the order in which ``--engine auto`` tries them.
ENGINES: dict[str, EngineEntry] = {
    "vllm": EngineEntry(
        "mopd_server.engines.vllm.loading",
        options=(
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "quantization",
            "vllm_arg",
        ),
    ),
    "transformers": EngineEntry("mopd_server.engines.transformers"),
}


def load_engine(settings: TeacherSettings, table: "TokenTable") -> "Engine | AsyncEngine":
    """Load the engine that the settings select, with its model.

    Raises:
        ConfigError: if the engine is unknown or unavailable, lacks an option, or cannot run the
            model.
        DataError: if the head is narrower than the tokenizer.
    """
    name = _select(settings)
    _require_supported_options(name, settings)
    return _module(name).load_engine(settings, table)


def _select(settings: TeacherSettings) -> str:
    if settings.engine == AUTO:
        return next(name for name in ENGINES if _module(name).is_available(settings))
    if settings.engine not in ENGINES:
        raise ConfigError(
            f"--engine: unknown engine (found {settings.engine!r}, expected {AUTO} or one of "
            f"{', '.join(ENGINES)})",
            key="engine",
        )
    return settings.engine


def _require_supported_options(name: str, settings: TeacherSettings) -> None:
    defaults = {field.name: field.default for field in fields(TeacherSettings)}
    for other, entry in ENGINES.items():
        for option in set(entry.options) - set(ENGINES[name].options):
            if getattr(settings, option) != defaults[option]:
                raise ConfigError(
                    f"--{option.replace('_', '-')}: not supported by engine {name} (found "
                    f"--engine {settings.engine}, expected {other}). Remove the option, or pass "
                    f"--engine {other}.",
                    key=option,
                )


def _module(name: str) -> EngineModule:
    return cast(EngineModule, import_module(ENGINES[name].module))
