"""Conversations of a row: roles, texts, parts and tool calls, as other programs spell them."""

import json
from collections.abc import Collection
from typing import Any

from pydantic import Field, ValidationError

from mopd_protocol.messages import Message, Tool, ToolCall
from mopd_trainer.config.data import DataConfig

JSON = dict[str, Any]

#: Keys of rows, and types of content parts, that are not text -> their medium.
MEDIA = {
    **dict.fromkeys(("image", "images", "image_url", "input_image"), "images"),
    **dict.fromkeys(("audio", "audios", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "videos", "video_url", "input_video"), "video"),
}
#: Keys of rows and messages that belong to tool calls, in places or spellings that nothing reads.
TOOLS = ("tools", "functions", "tool_calls", "tool_call_id", "function_call")
#: Key of a row's tools.
TOOLS_KEY = "tools"
#: Optional keys of a message, besides ``name`` in a tool's.
_OPTIONAL = ("tool_calls", "tool_call_id", "thinking", "reasoning_content")
#: Key of a message with the teacher of this turn (``data.turns: all``).
_TEACHER = "teacher"

_TEXT_PARTS = (None, "text", "input_text", "output_text")
#: Roles of ShareGPT and its relatives.
_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    **dict.fromkeys(("system",), "system"),
}


class LineError(ValueError):
    """An invalid line, and the settings of its file that make it valid (none: fix the line)."""

    def __init__(self, problem: str, **settings: str | list[str]) -> None:
        super().__init__(problem)
        self.settings = settings


class EmptyPromptError(LineError):
    """The message to complete is empty or blank."""


class RoutedMessage(Message):
    """A message with the teacher of its turn: a name, or names with weights."""

    teacher: Any = Field(exclude=True)


def conversation(value: Any, key: str, config: DataConfig) -> list[Message]:
    """Read a list of messages.

    A message is ``{role, content}``, or ShareGPT's ``{from, value}``; its content is a text or a
    list of OpenAI's parts of type text. It may have ``tool_calls``, ``tool_call_id`` and
    ``thinking`` (or ``reasoning_content``), and with ``data.turns: all`` a ``teacher``. Keys
    without a value do not count.

    Args:
        value: of the row's ``key``; a mapping of lists, as ``datasets`` returns a sequence of
            structs, is a list of messages too.
        config: names other keys that messages may have.

    Raises:
        LineError: for everything else; images and audio are named.
        EmptyPromptError: for an empty list.
    """
    turns = _rows(value) if isinstance(value, dict) else value  # pyright: ignore[reportUnknownArgumentType]
    if turns == []:
        raise EmptyPromptError(f"{key!r}: no messages")
    if not isinstance(turns, list):
        raise LineError(f"{key!r}: found {_short(value)}, expected a list of messages")
    return [
        _message(turn, f"message {number} of {key!r}", config)
        for number, turn in enumerate(turns, 1)
    ]


def unicode_text(value: Any, subject: str) -> str:
    """Return a text; half a surrogate pair, which JSON can represent and UTF-8 cannot, is invalid.

    Raises:
        LineError: for other values.
    """
    if not isinstance(value, str):
        raise LineError(f"{subject}: found {_short(value)}, expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise LineError(f"{subject}: half a surrogate pair at character {error.start}") from error
    return value


def unsupported(keys: Collection[str]) -> str:
    """Return what keys or types stand for that mopd has no support for; empty if nothing."""
    for key in keys:
        if key in MEDIA:
            return MEDIA[key]
    return "tools" if any(key in TOOLS for key in keys) else ""


def tools_of(row: JSON) -> tuple[Tool, ...]:
    """Return the JSON schemas of a row's tools: a list, or JSON text of one.

    Raises:
        LineError: for other values.
    """
    value = row.get(TOOLS_KEY)
    if isinstance(value, str):
        try:
            value = json.loads(unicode_text(value, repr(TOOLS_KEY)) or "[]")
        except (ValueError, RecursionError) as error:
            raise LineError(f"{TOOLS_KEY!r}: text that is no JSON ({error})") from error
    if not isinstance(value or [], list) or not all(isinstance(each, dict) for each in value or []):
        raise LineError(
            f"{TOOLS_KEY!r}: found {_short(value)}, expected a list of JSON schemas",
            ignored_keys=[TOOLS_KEY],
        )
    return tuple(value or [])


def role_of(turn: JSON) -> str:
    """Return the role of a message as chat templates spell it; empty if it has none."""
    role = turn.get("from") or turn.get("role") or ""
    return _ROLES.get(str(role).lower(), str(role))


def _rows(columns: dict[str, Any]) -> Any:
    """Return the rows of a mapping of lists of one length; None for other mappings."""
    lengths = {len(each) if isinstance(each, list) else -1 for each in columns.values()}
    if len(lengths) != 1 or -1 in lengths:
        return None
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _message(turn: Any, subject: str, config: DataConfig) -> Message:
    if not isinstance(turn, dict):
        raise LineError(f"{subject}: found {_short(turn)}, expected {{role, content}}")
    values: JSON = turn  # pyright: ignore[reportUnknownVariableType]
    spelling = ("from", "value") if values.get("from") is not None else ("role", "content")
    is_tool = str(values.get("role")).lower() == "tool"
    known_keys = {*spelling, *_OPTIONAL} | ({"name"} if is_tool else set())
    if config.turns == "all" and role_of(values) == "assistant":
        known_keys.add(_TEACHER)
    values = {
        key: value
        for key, value in values.items()
        if key in spelling or (value not in (None, "", []) and not config.drops(key))
    }
    unknown = sorted(key for key in values if key not in known_keys and not config.ignores(key))
    if unknown:
        name = unsupported(unknown)
        problem = f"{name} are not supported" if name else "unknown keys"
        raise LineError(
            f"{subject}: {problem} (found {', '.join(unknown)}, expected {', '.join(spelling)})",
            ignored_keys=unknown,
        )
    role = unicode_text(values.get(spelling[0]), f"{subject}, {spelling[0]}")
    known = _ROLES.get(role.lower())
    if known is None and spelling[0] == "from":
        raise LineError(f"{subject}: role {role!r} is not supported, expected {', '.join(_ROLES)}")
    fields: JSON = {"role": known or role}
    if "tool_calls" in values:
        fields["tool_calls"] = _tool_calls(values["tool_calls"], subject)
    for key in ("tool_call_id", "name", "thinking", "reasoning_content"):
        if key in values and key in known_keys:
            name = "thinking" if key == "reasoning_content" else key
            fields[name] = unicode_text(values[key], f"{subject}, {key}")
    content = values.get(spelling[1])
    if content is not None or "tool_calls" not in fields:
        fields["content"] = _content(content, subject)
    if _TEACHER in known_keys and _TEACHER in values:
        return RoutedMessage(**fields, teacher=values[_TEACHER])
    return Message(**fields)


def _tool_calls(value: Any, subject: str) -> list[ToolCall]:
    """Read calls ``{id, type, function: {name, arguments}}``, or only ``{name, arguments}``."""
    try:
        return [
            ToolCall.model_validate(
                {key: each[key] for key in ("id", "type", "function") if each.get(key) is not None}
                if "function" in each
                else {"function": each}
            )
            for each in value
        ]
    except (ValidationError, TypeError, AttributeError) as error:
        raise LineError(
            f"{subject}: tool_calls: found {_short(value)}, expected a list of {{function: {{name, "
            "arguments}}, with arguments as an object or its JSON",
            ignored_keys=["tool_calls"],
        ) from error


def _content(value: Any, subject: str) -> str:
    if not isinstance(value, list):
        return unicode_text(value, f"{subject}, content")
    parts: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
    return "".join(_part(part, subject) for part in parts)


def _part(part: Any, subject: str) -> str:
    if isinstance(part, dict):
        values: JSON = part  # pyright: ignore[reportUnknownVariableType]
        kind = values.get("type")
        if kind not in _TEXT_PARTS or not isinstance(values.get("text"), str):
            name = MEDIA.get(str(kind), f"content parts of type {kind!r}")
            raise LineError(f"{subject}: {name} are not supported, expected parts of type text")
        part = values["text"]
    return unicode_text(part, f"{subject}, content")


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
