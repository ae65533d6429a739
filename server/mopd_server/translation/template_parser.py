"""``TemplateParser``: the messages of a prompt from its ids, by inverting the chat template.

Renderings of known conversations show what the template adds between the messages. A parse counts
only if its messages render to the same ids again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mopd_protocol.errors import TeacherError
from mopd_protocol.samples import Message
from mopd_protocol.tokenizers.token_table import TokenTable

#: Messages -> ids of the prompt.
Renderer = Callable[[Sequence[Message]], list[int]]

_PROBES = ("sentinelone", "sentineltwo", "sentinelthree")
#: Generation prompts at which a prompt may end, from the last one on.
_MOST_ATTEMPTS = 8


@dataclass(frozen=True)
class ParsedPrompt:
    """Messages and the number of their tokens."""

    messages: tuple[Message, ...]
    tokens: int


class UnknownPromptError(TeacherError):
    """No messages render to these ids; ``position`` is the first id that differs."""

    def __init__(self, problem: str, position: int) -> None:
        super().__init__(problem, key="prompt")
        self.position = position


@dataclass(frozen=True)
class _Separators:
    """Text of a template before, between and behind messages, in marked bytes."""

    head: bytes  # before the first user message
    generation: bytes  # behind the last user message
    completion: bytes | None  # between a user message and the completion in the conversation
    next_user: bytes | None  # between an completion and the next user message
    system_head: bytes | None  # before the system message
    system_end: bytes | None  # between the system message and the first user message


class TemplateParser:
    """Invert a template of system, user and assistant messages.

    Args:
        table: the tokens of the template's tokenizer.
        render: renders and tokenizes messages with the generation prompt.
    """

    def __init__(self, table: TokenTable, render: Renderer) -> None:
        self._table = table
        self._render = render
        self._separators = self._probe()

    def parse(self, ids: Sequence[int]) -> ParsedPrompt:
        """Return the longest prompt that these ids begin with and end with a completion of.

        Raises:
            UnknownPromptError: if there is none.
        """
        text, ends = self._marked(ids)
        separators = self._separators
        if separators is None:
            raise UnknownPromptError("the chat template cannot be inverted", 0)
        failure = UnknownPromptError(
            "no generation prompt of the student's chat template found",
            _token_at(ends, common_prefix(text, separators.head)),
        )
        boundaries = {end: index + 1 for index, end in enumerate(ends)}
        attempts = 0
        for end in _ends_of(separators.generation, text):
            tokens = boundaries.get(end)
            if tokens is None or attempts == _MOST_ATTEMPTS:
                continue
            attempts += 1
            try:
                messages = self._messages(text[:end], separators)
                rendered = self._render(messages)
            except (UnknownPromptError, TeacherError) as error:
                position = _token_at(ends, getattr(error, "position", 0))
                if position > failure.position:
                    failure = UnknownPromptError(str(error), position)
                continue
            if rendered == list(ids[:tokens]):
                return ParsedPrompt(tuple(messages), tokens)
            position = common_prefix(ids[:tokens], rendered)
            if position >= failure.position:
                problem = "the parsed messages render to other ids"
                failure = UnknownPromptError(problem, position)
        raise failure

    def _messages(self, text: bytes, separators: _Separators) -> list[Message]:
        """Parse a prompt; positions of errors are bytes."""
        messages: list[Message] = []
        rest = text.removesuffix(separators.generation)
        head, system_head = separators.head, separators.system_head
        system_end = separators.system_end or b""
        # The longer beginning: a system message by default, or one inside the user message.
        if (
            system_head is not None
            and text.startswith(system_head)
            and system_end in rest[len(system_head) :]
            and (len(system_head) > len(head) or not text.startswith(head))
        ):
            system, _, rest = rest[len(system_head) :].partition(system_end)
            messages.append(_message("system", system, len(system_head)))
        elif text.startswith(head):
            rest = rest[len(head) :]
        else:
            raise UnknownPromptError(
                "the beginning is not that of the chat template", common_prefix(text, head)
            )
        start = len(text) - len(separators.generation) - len(rest)
        while separators.completion is not None and separators.next_user is not None:
            user, separator, behind = rest.partition(separators.completion)
            completion, next_separator, behind = behind.partition(separators.next_user)
            if not (separator and next_separator):
                break
            messages.append(_message("user", user, start))
            messages.append(
                _message("assistant", completion, start + len(user + separators.completion))
            )
            start += len(rest) - len(behind)
            rest = behind
        messages.append(_message("user", rest, start))
        return messages

    def _marked(self, ids: Sequence[int]) -> tuple[bytes, list[int]]:
        """Return what ids spell, with bytes of no text for a control token, and the end of each."""
        spelled, marks = self._table.all_bytes, self._table.marks
        pieces = [
            b"\xff%d\xfe" % token if token in marks or token >= len(spelled) else spelled[token]
            for token in ids
        ]
        return b"".join(pieces), np.cumsum([len(piece) for piece in pieces]).tolist()

    def _probe(self) -> _Separators | None:
        """Return the separators; None if a conversation does not contain each message once."""
        first, second, third = _PROBES
        plain = self._parts([("user", first)])
        if plain is None:
            return None
        system = self._parts([("system", first), ("user", second)])
        turns = self._parts([("user", first), ("assistant", second), ("user", third)])
        if turns is not None and (turns[0], turns[3]) != (plain[0], plain[1]):
            turns = None
        return _Separators(
            head=plain[0],
            generation=plain[1],
            completion=None if turns is None else turns[1],
            next_user=None if turns is None else turns[2],
            system_head=None if system is None else system[0],
            system_end=None if system is None else system[1],
        )

    def _parts(self, turns: Sequence[tuple[str, str]]) -> list[bytes] | None:
        """Return what is around the messages of a conversation; None if it cannot be divided."""
        messages = [Message(role=role, content=content) for role, content in turns]
        try:
            rest, _ = self._marked(self._render(messages))
        except TeacherError:  # a role that the template does not support
            return None
        parts: list[bytes] = []
        for message in messages:
            before, separator, rest = rest.partition(message.content.encode())
            if not separator:
                return None
            parts.append(before)
        return [*parts, rest] if rest else None


def _message(role: str, content: bytes, start: int) -> Message:
    try:
        return Message(role=role, content=content.decode())
    except UnicodeDecodeError as error:
        raise UnknownPromptError(
            f"the {role} message contains a control token or bytes that are not UTF-8",
            start + error.start,
        ) from error


def _ends_of(part: bytes, text: bytes) -> Iterator[int]:
    """Return the ends of all occurrences, the last one first."""
    start = text.rfind(part)
    while start >= 0:
        yield start + len(part)
        start = text.rfind(part, 0, start + len(part) - 1)


def _token_at(ends: Sequence[int], byte: int) -> int:
    return int(np.searchsorted(ends, byte, side="right"))


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    pairs = zip(first, second, strict=False)
    return next(
        (index for index, (left, right) in enumerate(pairs) if left != right),
        min(len(first), len(second)),
    )
