"""``CALL_FORMATS``: how families of models spell tool calls, recognised by the chat template."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from mopd_protocol.errors import DataError
from mopd_protocol.messages import FunctionCall, Message, ToolCall
from mopd_trainer.student.identity import StudentIdentity

#: Content and tool calls of a completion.
Parsed = tuple[str, list[ToolCall]]

_HERMES_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class CallFormat:
    """A spelling of tool calls: text that a template shows with every call, and its parser.

    The parser raises ValueError for text that is no call.
    """

    name: str
    mark: str
    parse: Callable[[str], Parsed]


def _hermes(text: str) -> Parsed:
    """Parse text, and calls ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` behind it."""
    before, mark, rest = text.partition("<tool_call>")
    if not mark or _HERMES_CALL.sub("", mark + rest).strip():
        raise ValueError("no calls at the end")
    calls = [_call(json.loads(each)) for each in _HERMES_CALL.findall(mark + rest)]
    return before.removesuffix("\n"), calls


def _mistral(text: str) -> Parsed:
    """Parse text, and calls ``[TOOL_CALLS] [{"name": …, "arguments": {…}, "id": …}]`` behind it."""
    before, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        raise ValueError("no calls")
    return before, [_call(each) for each in json.loads(rest)]


def _llama(text: str) -> Parsed:
    """Parse a completion that is one call ``{"name": …, "parameters": {…}}``."""
    call = json.loads(text.removeprefix("<|python_tag|>"))
    return "", [_call({"name": call["name"], "arguments": call["parameters"]})]


CALL_FORMATS = (
    CallFormat("hermes", "<tool_call>", _hermes),
    CallFormat("mistral", "[TOOL_CALLS]", _mistral),
    CallFormat("llama", '"parameters"', _llama),
)

_PROBE = (
    Message(role="user", content="?"),
    Message(
        role="assistant",
        content="",
        tool_calls=[
            ToolCall(id="abcdefghi", function=FunctionCall(name="f", arguments={"a": "b"}))
        ],
    ),
)


def call_format_of(student: StudentIdentity) -> CallFormat | None:
    """Return the format in which the student's template shows a call; None if it shows none."""
    try:
        rendered = student.render(_PROBE, add_generation_prompt=False)
    except DataError:
        return None
    return next((each for each in CALL_FORMATS if each.mark in rendered), None)


def reply_of(text: str, call_format: CallFormat | None, *, splits_thinking: bool) -> Message:
    """Return the message of a completion, so that a template shows its text again.

    Args:
        text: without the token that ends the turn.
        call_format: of the student; None: calls are content.
        splits_thinking: the template has a key for thinking, which else is content.
    """
    thinking = None
    if splits_thinking and "</think>" in text:
        before, _, text = text.partition("</think>")
        thinking = before.strip().removeprefix("<think>").strip("\n")
        text = text.lstrip("\n")
    content, calls = text, list[ToolCall]()
    if call_format is not None:
        # No call, or an invalid one: the text is content.
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            content, calls = call_format.parse(text)
    return Message(role="assistant", content=content, tool_calls=calls, thinking=thinking)


def _call(value: Any) -> ToolCall:
    try:
        function = FunctionCall(name=value["name"], arguments=value["arguments"])
        return ToolCall(id=value.get("id"), function=function)
    except ValidationError as error:
        raise ValueError("invalid call") from error
