"""``Message``: a message of a conversation, with tool calls and thinking, as templates take it."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

#: JSON schemas of tools, as ``apply_chat_template`` of transformers takes them.
Tool = dict[str, JsonValue]


def _arguments(value: object) -> object:
    """Return the object of JSON text: several families' templates would quote a text again."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError("found text that is no JSON object, expected an object or its JSON")
    return parsed  # pyright: ignore[reportUnknownVariableType]


class FunctionCall(BaseModel):
    """Name and arguments of a call; arguments may also be given as JSON text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    arguments: Annotated[dict[str, JsonValue], BeforeValidator(_arguments)]


class ToolCall(BaseModel):
    """A call of a tool by the assistant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    @model_serializer(mode="wrap")
    def _serialize(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_none(serialize(self))


class Message(BaseModel):
    """One message of a conversation.

    Its serialized form is what chat templates take: keys without a value are missing, because
    templates test whether a message has a key. The content of a message with tool calls may be
    null.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: str
    content: str
    tool_calls: Annotated[
        Annotated[list[ToolCall], Field(fail_fast=True)] | None, AfterValidator(lambda v: v or None)
    ] = None
    """Calls by the assistant."""
    tool_call_id: str | None = None
    """Id of the call whose result this message of role ``tool`` is."""
    name: str | None = None
    """Name of the tool whose result this is, or of the speaker."""
    thinking: str | None = Field(
        default=None, validation_alias=AliasChoices("thinking", "reasoning_content")
    )
    """Text before the content, which most templates show in the last turn only; serialized as
    ``reasoning_content``, the key of templates."""

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, values: object) -> object:
        if isinstance(values, Mapping) and values.get("tool_calls"):  # pyright: ignore[reportUnknownMemberType]
            fields: dict[str, Any] = {**values}
            return {**fields, "content": fields.get("content") or ""}
        return values  # pyright: ignore[reportUnknownVariableType]

    @model_serializer(mode="wrap")
    def _serialize(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = _without_none(serialize(self))
        if "thinking" in fields:
            fields["reasoning_content"] = fields.pop("thinking")
        return fields

    @property
    def texts(self) -> list[str]:
        """All texts of the message; tool calls as JSON."""
        calls = [json_text(call.model_dump()) for call in self.tool_calls or ()]
        optional = (self.tool_call_id, self.name, self.thinking)
        return [self.role, self.content, *(text for text in optional if text), *calls]


def json_text(value: object) -> str:
    """Return compact JSON in the order of its keys, which templates show."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def conversation_key(messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    """Return the JSON of a conversation with tools; conversations that differ have other texts."""
    return json_text([[message.model_dump() for message in messages], [*tools]])


#: Variables of a template for the tools: of all families, and of SmolLM3.
_TOOLS = ("tools", "xml_tools")


def template_messages(messages: Sequence[Message], template: object) -> list[dict[str, Any]]:
    """Return messages for a chat template.

    A template that renders no tool calls (SmolLM3) shows them as text, in the form that its own
    instructions name: JSON between ``<tool_call>`` tags.

    Args:
        template: its text, or a mapping of names to texts.
    """
    renders_calls = "tool_calls" in str(template)
    return [(each if renders_calls else calls_as_text(each)).model_dump() for each in messages]


def calls_as_text(message: Message) -> Message:
    """Return a message with its tool calls in the content, between ``<tool_call>`` tags."""
    if not message.tool_calls:
        return message
    calls = [
        f"<tool_call>\n{json.dumps(each.function.model_dump(), ensure_ascii=False)}\n</tool_call>"
        for each in message.tool_calls
    ]
    content = "\n".join([*filter(None, [message.content]), *calls])
    return message.model_copy(update={"content": content, "tool_calls": None})


def template_tools(tools: Sequence[Tool], template: object) -> dict[str, list[Tool]]:
    """Return the variables of a chat template for the tools; none without tools.

    Raises:
        ValueError: if the template has no such variable: it would not show the tools.
    """
    if not tools:
        return {}
    names = [name for name in _TOOLS if re.search(rf"\b{name}\b", str(template))]
    if not names:
        raise ValueError(
            "it shows no tools (found no variable tools, expected a template with one)"
        )
    return {name: [*tools] for name in names}


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
