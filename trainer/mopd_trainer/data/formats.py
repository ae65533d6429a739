"""``FORMATS``: the spellings of a prompt and its reference answer in a row of data.

A format is one row of the table: its name, the keys by which it is recognised, other keys that
belong to it, and the function that reads a row. The first format whose keys all have a value reads
the row; a file may mix formats.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mopd_protocol.messages import Message
from mopd_trainer.config.data import DataConfig
from mopd_trainer.data.messages import (
    JSON,
    MEDIA,
    TOOLS,
    TOOLS_KEY,
    EmptyPromptError,
    LineError,
    conversation,
    role_of,
    unicode_text,
    unsupported,
)

#: Keys of a line's teacher if ``teacher_key`` is not set.
TEACHER_KEYS = ("teacher", "data_source", "tag", "dataset")
#: Keys of a system message, valid in any format.
SYSTEM_KEYS = ("system", "system_prompt")
#: Keys by which other programs change the rendered prompt, and which nothing reads.
RENDERING_KEYS = ("chat_template_kwargs", "documents", *TOOLS, *MEDIA)

#: Setting of a key without a format -> usual names of the key, after that in the setting's name.
_USUAL_KEYS = {
    "question_key": ("query", "problem", "input", "inputs", "user", "text", "chosen"),
    "answer_key": ("response", "solution", "output", "target", "completion"),
}
#: What the reference answer of a conversation is.
LAST_MESSAGE = "the last assistant message"

#: Messages of a row, and its reference answer, a message of the assistant.
Turns = tuple[list[Message], Message | None]


@dataclass(frozen=True)
class Format:
    """A spelling of prompts."""

    name: str
    keys: tuple[str, ...]  # that a row of this format has
    others: tuple[str, ...]  # that it may have
    reference: str  # what the reference answer is, for messages
    read: Callable[[JSON, DataConfig], Turns]

    def reads(self, row: JSON) -> bool:
        """Return True if all keys have a value."""
        return all(row.get(key) is not None for key in self.keys)


def format_of(row: JSON, config: DataConfig) -> Format:
    """Return the format of a row without ignored keys.

    Raises:
        LineError: if there is none; the setting that helps is named.
    """
    if config.question_key is not None:
        return _chat(
            config.question_key,
            text=True,
            others=("messages", "prompt"),
            name=f"data.question_key={config.question_key}",
        )
    for each in FORMATS:
        if each.reads(row):
            return each
    raise _no_format(row, config)


def read_turns(row: JSON, spelling: Format, config: DataConfig) -> Turns:
    """Return the messages of a row with its system message, and its reference answer.

    Raises:
        LineError: for an invalid row.
        EmptyPromptError: if there is nothing to complete.
    """
    messages, reference = spelling.read(row, config)
    key = next((key for key in SYSTEM_KEYS if row.get(key) not in (None, "")), None)
    if key is not None:
        system = Message(role="system", content=unicode_text(row[key], repr(key)))
        if any(each.role == "system" and each != system for each in messages):
            raise LineError(f"two system messages (one is {key!r})", ignored_keys=[key])
        messages = [system, *(each for each in messages if each.role != "system")]
    if not messages or messages[-1].role == "assistant":
        problem = "the prompt ends with an assistant message" if messages else "no user message"
        raise LineError(f"{problem}, expected a message to complete")
    if not messages[-1].content.strip() and messages[-1].role != "tool":
        raise EmptyPromptError("empty prompt")
    return messages, reference


def require_known_keys(
    row: JSON,
    spelling: Format,
    config: DataConfig,
    *,
    keep_row: bool,
    others: Collection[str] = (),
) -> None:
    """Reject keys that nothing reads; a key without a value does not count.

    Args:
        row: without ignored keys.
        others: more keys that are read.
        keep_row: only keys of other programs that change the rendered prompt are unknown.

    Raises:
        LineError: with the setting that helps.
    """
    if config.ignored_keys == "all":
        return
    configured = (config.question_key, config.answer_key, config.teacher_key)
    used = {*spelling.keys, *spelling.others, *configured, *SYSTEM_KEYS, *TEACHER_KEYS, TOOLS_KEY}
    used |= {*others}
    unknown = sorted(key for key in row if key not in used and row[key] is not None)
    # Datasets of texts and images have an empty list for a text.
    unknown = [key for key in unknown if key not in MEDIA or row[key] != []]
    if keep_row:
        unknown = [key for key in unknown if key in RENDERING_KEYS]
    if not unknown:
        return
    name = unsupported(unknown)
    if name in MEDIA.values():
        raise LineError(f"{name} are not supported (found key {', '.join(unknown)})")
    if not {"chosen", "rejected"}.isdisjoint(unknown):
        name = "preference pairs"
    complete = name or config.answer_key or _has_reference(row, spelling)
    settings = {} if complete else _usual("answer_key", unknown)
    rest = [key for key in unknown if key not in settings.values()]
    guesses = get_close_matches(unknown[0], sorted(filter(None, used)), n=1, cutoff=0.7)
    hint = f", did you mean {guesses[0]!r}" if guesses else ""
    problem = f"{name} are not supported" if name else "unknown keys"
    settings |= {"ignored_keys": rest} if rest else {}
    raise LineError(f"{problem} (found {', '.join(unknown)}{hint})", **settings)


def _has_reference(row: JSON, spelling: Format) -> bool:
    """Return True if the format has a reference answer without a setting."""
    value: Any = row.get(spelling.keys[0])
    last: Any = value[-1] if isinstance(value, list) and value else None
    is_assistant = isinstance(last, dict) and role_of(last) == "assistant"  # pyright: ignore[reportUnknownArgumentType]
    return is_assistant or spelling.reference != LAST_MESSAGE


def _no_format(row: JSON, config: DataConfig) -> LineError:
    """Return the error for a row without a known format."""
    keys = sorted(key for key, value in row.items() if value is not None)
    names = ", ".join(" and ".join(each.keys) for each in FORMATS)
    problem = f"no known format (found keys {', '.join(keys) or 'none'}, expected {names})"
    name = unsupported(keys)
    if "chosen" in keys and not isinstance(row["chosen"], list):
        name = "preference pairs of plain text"
    if name:
        return LineError(f"{name} are not supported, and there is {problem}")
    settings = _usual("question_key", keys)
    if not config.answer_key:
        settings |= _usual("answer_key", keys)
    known = {*TEACHER_KEYS, *SYSTEM_KEYS, TOOLS_KEY, config.teacher_key, config.answer_key}
    if "question_key" not in settings:
        other = [key for key in keys if key not in known and key not in settings.values()]
        texts = [key for key in other if isinstance(row[key], str | list)]
        if len(texts) != 1:
            return LineError(problem, **({"question_key": "KEY"} if texts else {}))
        settings["question_key"] = texts[0]
    rest = [key for key in keys if key not in known and key not in settings.values()]
    if rest and config.ignored_keys != "all":
        settings["ignored_keys"] = rest
    return LineError(problem, **settings)


def _usual(setting: str, keys: Collection[str]) -> dict[str, str | list[str]]:
    """Return the setting with the first usual key; empty if there is none."""
    spelled = {key.lower(): key for key in keys}
    usual = (setting.removesuffix("_key"), *_USUAL_KEYS[setting])
    key = next((spelled[key] for key in usual if key in spelled), None)
    return {} if key is None else {setting: key}


def _chat(key: str, *, text: bool, others: tuple[str, ...] = (), name: str = "") -> Format:
    """Return the format of a conversation; a last assistant message is the reference answer.

    Args:
        text: a text is valid too, as the user message.
    """

    def read(row: JSON, config: DataConfig) -> Turns:
        messages = _prompt(row, key, config) if text else conversation(row[key], key, config)
        if messages[-1].role == "assistant":
            return messages[:-1], _unless_empty(messages[-1])
        return messages, None

    return Format(name or key, (key,), others, LAST_MESSAGE, read)


def _read_completion(row: JSON, config: DataConfig) -> Turns:
    return _prompt(row, "prompt", config), completion(row, "completion", config)


def _unless_empty(message: Message) -> Message | None:
    return message if message.content or message.tool_calls else None


def _prompt(row: JSON, key: str, config: DataConfig) -> list[Message]:
    if isinstance(row.get(key), list | dict):
        return conversation(row[key], key, config)
    return [Message(role="user", content=unicode_text(row.get(key), repr(key)))]


def completion(row: JSON, key: str, config: DataConfig) -> Message | None:
    """Return a reference answer: a text, or a list of one assistant message; None if empty.

    Raises:
        LineError: for other values.
    """
    value: Any = row.get(key)
    if value is None or isinstance(value, str):
        text = unicode_text(value or "", repr(key))
        return Message(role="assistant", content=text) if text else None
    messages = conversation(value, key, config)
    if len(messages) != 1 or messages[0].role != "assistant":
        roles = ", ".join(each.role for each in messages)
        raise LineError(f"{key!r}: found messages of {roles}, expected one of role assistant")
    return _unless_empty(messages[0])


def _read_instruction(row: JSON, config: DataConfig) -> Turns:
    """Join instruction and input, if it is not empty, with a blank line."""
    keys = ("instruction", "input", "context")
    texts = [unicode_text(row.get(key) or "", repr(key)) for key in keys]
    content = "\n\n".join(text for text in texts if text.strip())
    reference = completion(row, "output", config) or completion(row, "response", config)
    return [Message(role="user", content=content)], reference


FORMATS = (
    # UltraChat repeats its first message as ``prompt``.
    _chat("messages", text=False, others=("prompt",)),
    Format("prompt and completion", ("prompt", "completion"), (), "'completion'", _read_completion),
    _chat("prompt", text=True),
    _chat("conversations", text=False, name="conversations (ShareGPT)"),
    _chat("conversation", text=False, name="conversation (ShareGPT)"),
    # Dolly has context and response; the first Alpaca data repeats its keys, rendered, as ``text``.
    Format(
        "instruction (Alpaca)",
        ("instruction",),
        ("input", "output", "context", "response", "text"),
        "'output'",
        _read_instruction,
    ),
)
