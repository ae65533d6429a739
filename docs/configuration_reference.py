"""Writes ``pages/configuration.md``: every setting of a run, from the models that check it.

A field's meaning is the string under it in the source; pydantic keeps types and defaults only.
"""

import ast
import inspect
import sys
import textwrap
import typing
from functools import cache
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mopd_losses import config as losses
from mopd_losses.config import ProjectionSettings
from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.teacher import TeacherConfig

PAGE = Path(__file__).parent / "pages" / "configuration.md"

_HEAD = """\
# Configuration

A run is one YAML file; `mopd check` and `mopd train` take it, and `KEY=VALUE` overrides with dots
for nesting. Unknown keys are refused, and `${oc.env:NAME,default}` reads the environment. A run
writes what it resolved to `config.yaml` in its folder.

This page is made by `docs/configuration_reference.py` from the models that check a run.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, _section("The run", "", RunConfig), *_nested(RunConfig, "")]
    parts.append(
        "## Losses\n\nA teacher's `loss`, told apart by its `type`; "
        "[which to use when](losses.md).\n"
    )
    for model in typing.get_args(typing.get_args(losses.LossConfig)[0]):
        kind = model.model_fields["type"].default
        parts.append(_section(f"{kind}", "loss.", model, level=3))
    parts.append(_section("projection of a loss", "loss.projection.", ProjectionSettings, level=3))
    return "\n".join(parts)


def _nested(model: type[BaseModel], prefix: str) -> list[str]:
    """The sections of a model's own settings that are models, each followed by its own; losses
    have sections of their own."""
    parts: list[str] = []
    for name, field in model.model_fields.items():
        for inner in _models(field.annotation) if name != "loss" else []:
            key = f"{prefix}{name}" + (".NAME" if inner is TeacherConfig else "")
            parts += [_section(f"{prefix}{name}", f"{key}.", inner), *_nested(inner, f"{key}.")]
    return parts


def _section(title: str, prefix: str, model: type[BaseModel], level: int = 2) -> str:
    told = meanings(model)
    rows = [
        f"| `{prefix}{name}` | {_type(field)} | {_default(field)} | {told.get(name, '')} |"
        for name, field in model.model_fields.items()
        if name != "type"
    ]
    about = _plain(inspect.getdoc(model) or "") if "__doc__" in vars(model) else ""
    table = "\n".join(["| key | is | default | |", "|---|---|---|---|", *rows])
    return f"{'#' * level} {title}\n\n{about}\n\n{table if rows else 'It has no settings.'}\n"


@cache
def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Field -> the sentences under it, its base classes' included."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if not issubclass(owner, BaseModel) or owner is BaseModel:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[field.target.id] = _plain(str(text.value.value))
    return found


def _models(annotation: object) -> list[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models(part)]


def _type(field: FieldInfo) -> str:
    limits = [f"{sign} {value:g}" for sign, value in _limits(field)]
    return " ".join([_spelled(field.annotation), *limits])


def _limits(field: FieldInfo) -> list[tuple[str, float]]:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return [
        (sign, getattr(limit, name))
        for limit in field.metadata
        for name, sign in signs.items()
        if hasattr(limit, name)
    ]


def _spelled(annotation: object) -> str:
    if annotation is type(None):
        return "null"
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is typing.Annotated:
        return _spelled(parts[0])
    if origin in (tuple, list):
        return f"list of {_spelled(parts[0])}"
    if origin is dict:
        return f"{_spelled(parts[1])} by name"
    if parts:
        return "a loss" if len(parts) > 4 else " or ".join(map(_spelled, parts))
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "settings"
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, "a loss" if "Config" in name else name.lower())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**needed**"
    if isinstance(field.default, BaseModel):
        kind = getattr(field.default, "type", None)
        return f"`{{type: {kind}}}`" if kind else "its defaults"
    spelled = {None: "not set", True: "`true`", False: "`false`"}
    if field.default is None or isinstance(field.default, bool):
        return spelled[field.default]
    if isinstance(field.default, tuple):
        return f"`{list(field.default)}`"
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE}\n")
