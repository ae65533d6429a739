"""Conversations of a row: roles, texts and content parts, as other programs spell them."""

from collections.abc import Callable, Collection
from typing import Any

from mopd_protocol.samples import Message

JSON = dict[str, Any]

#: Keys of rows, and types of content parts, that are not text -> their medium.
MEDIA = {
    **dict.fromkeys(("image", "images", "image_url", "input_image"), "images"),
    **dict.fromkeys(("audio", "audios", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "videos", "video_url", "input_video"), "video"),
}
#: Keys of rows and messages that belong to tool calls.
TOOLS = ("tools", "functions", "tool_calls", "tool_call_id", "function_call")

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


def conversation(value: Any, key: str, ignores: Callable[[str], bool]) -> list[Message]:
    """Read a list of messages.

    A message is ``{role, content}``, or ShareGPT's ``{from, value}``; its content is a text or a
    list of OpenAI's parts of type text. Keys without a value do not count.

    Args:
        value: of the row's ``key``; a mapping of lists, as ``datasets`` returns a sequence of
            structs, is a list of messages too.
        ignores: True for other keys that messages may have.

    Raises:
        LineError: for everything else; images, audio and tool calls are named.
        EmptyPromptError: for an empty list.
    """
    turns = _rows(value) if isinstance(value, dict) else value  # pyright: ignore[reportUnknownArgumentType]
    if turns == []:
        raise EmptyPromptError(f"{key!r}: no messages")
    if not isinstance(turns, list):
        raise LineError(f"{key!r}: found {_short(value)}, expected a list of messages")
    return [
        _message(turn, f"message {number} of {key!r}", ignores)
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


def _message(turn: Any, subject: str, ignores: Callable[[str], bool]) -> Message:
    if not isinstance(turn, dict):
        raise LineError(f"{subject}: found {_short(turn)}, expected {{role, content}}")
    values: JSON = turn  # pyright: ignore[reportUnknownVariableType]
    spelling = ("from", "value") if values.get("from") is not None else ("role", "content")
    unknown = [k for k, v in values.items() if k not in spelling and v not in (None, "", [])]
    unknown = sorted(key for key in unknown if not ignores(key))
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
    return Message(role=known or role, content=_content(values.get(spelling[1]), subject))


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
