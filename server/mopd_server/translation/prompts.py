"""``PromptResolver``: the messages behind a sequence of the student's ids, and where they end.

Messages come with the request, or are those of a registered prompt with these ids, or follow from
the ids by inverting the student's chat template.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from pydantic import ValidationError

from mopd_protocol.errors import DataError
from mopd_protocol.request_tokenizer import RequestTokenizer
from mopd_protocol.samples import Message
from mopd_protocol.tokenizers.token_table import encode_text
from mopd_server.service_error import ServiceError
from mopd_server.translation.template_parser import (
    ParsedPrompt,
    TemplateParser,
    UnknownPromptError,
    common_prefix,
)

#: Status of a prompt whose messages are unknown.
_BAD_REQUEST = 400


class PromptResolver:
    """Find prompts in the ids of prompt and completion.

    Args:
        student: tokenizer and chat template of the student.
        variables: of the student's chat template.
        registered: messages of known prompts.

    Raises:
        TeacherError: if the template rejects a registered prompt.
    """

    def __init__(
        self,
        student: RequestTokenizer,
        variables: Mapping[str, Any],
        registered: Iterable[Sequence[Message]] = (),
    ) -> None:
        self._student = student
        self._variables = variables
        self._parser = TemplateParser(student.table, self.render)
        self._registered = {
            _key(ids): ParsedPrompt(tuple(messages), len(ids))
            for messages in registered
            for ids in [self.render(messages)]
        }
        self._lengths = sorted({each.tokens for each in self._registered.values()}, reverse=True)

    def __len__(self) -> int:
        """Return the number of registered prompts."""
        return len(self._registered)

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Return the student's ids of a prompt, with the generation prompt.

        Raises:
            TeacherError: if the chat template rejects the messages.
        """
        text = self._student.render(messages, self._variables)
        return encode_text(self._student.tokenizer, text)

    def resolve(
        self, ids: Sequence[int], messages: Sequence[Message] | None, field: str
    ) -> ParsedPrompt:
        """Return the prompt that these ids begin with; of several turns, up to the last one.

        Args:
            messages: of the request, if any.
            field: name of the ids in errors.

        Raises:
            ServiceError: 400 if the ids do not begin with these messages, or with none that are
                known; the first position that differs is named.
        """
        if messages is not None:
            rendered = self.render(messages)
            if rendered == list(ids[: len(rendered)]):
                return ParsedPrompt(tuple(messages), len(rendered))
            raise _unknown(
                field,
                common_prefix(rendered, ids),
                "the messages of the request render to other ids in the student's chat template",
            )
        known = self._known(ids)
        last = len(ids) - 1
        ending = np.isin(ids, self._student.table.roles.ending)
        if known is not None and not ending[known.tokens : last].any():
            return known
        try:
            return self._parser.parse(ids)
        except UnknownPromptError as error:
            if known is not None:  # ids behind the end of its completion are no further turn
                return known
            raise _unknown(field, error.position, f"unknown prompt: {error}") from error

    def _known(self, ids: Sequence[int]) -> ParsedPrompt | None:
        """Return the longest registered prompt that these ids begin with."""
        lengths = (each for each in self._lengths if each <= len(ids))
        matches = (self._registered.get(_key(ids[:length])) for length in lengths)
        return next((each for each in matches if each is not None), None)


def read_prompts(path: Path) -> Iterator[list[Message]]:
    """Read the prompts of a file of JSON lines with ``messages``, or with ``prompt``: messages, or
    the text of a user message. Assistant messages at the end are reference answers.

    Raises:
        DataError: if the file is not found, or a line has no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompts {path}: cannot be read: {error}", key="prompts") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            messages = _messages_of(json.loads(line))
        except (ValueError, ValidationError) as error:
            raise DataError(
                f"--prompts {path}: line {number} has no prompt: {error} (expected a JSON object "
                "with 'messages', or a 'prompt' of messages or text)",
                key="prompts",
            ) from error
        while messages and messages[-1].role == "assistant":
            messages.pop()
        if messages:
            yield messages


def _messages_of(row: object) -> list[Message]:
    if not isinstance(row, dict):
        raise ValueError("not an object")
    fields = cast("dict[str, Any]", row)
    prompt: Any = fields.get("messages") or fields.get("prompt")
    if isinstance(prompt, str):
        return [Message(role="user", content=prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"found the keys {', '.join(fields)}")
    return [Message.model_validate(each) for each in cast("list[Any]", prompt)]


def _key(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int64).tobytes()


def _unknown(field: str, position: int, problem: str) -> ServiceError:
    return ServiceError(
        _BAD_REQUEST,
        f"{field}: {problem} (first difference at position {position}). Send the messages, "
        "register the prompts with --prompts, or use the student's chat template.",
        code="unknown_prompt",
        key=f"{field}[{position}]",
    )
