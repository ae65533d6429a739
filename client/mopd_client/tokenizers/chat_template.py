"""``ChatTemplate``: messages -> text, as transformers renders a model's chat template.

The environment is the one that templates are written for: jinja2 in its immutable sandbox, blocks
trimmed, loop controls, a ``tojson`` that leaves text as it is, ``raise_exception``,
``strftime_now``, and a ``generation`` block, which marks an answer and renders as its content.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mopd_protocol.errors import ConfigError, DataError


class ChatTemplate:
    """A compiled chat template.

    Args:
        text: the template.
        special_tokens: what it may name, such as ``bos_token`` -> ``<s>``.

    Raises:
        ConfigError: when the text is no template.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        self.text = text
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        functions: dict[str, Any] = environment.globals  # jinja2 declares only its own
        functions.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ConfigError(f"the chat template cannot be read: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The conversation as text.

        Raises:
            DataError: when the template refuses these messages.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(
                f"the chat template refuses messages with the roles {roles}: {error}"
            ) from error


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}``."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[Node]:
        """The block's content, in its place."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
