"""A teacher's own prompt: messages of a row that it sees instead of the student's.

A row has ``teacher_messages`` for its teachers or for some of them; or the settings of a teacher
name the column of its prompt, a system prompt, and a column whose text is appended.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mopd_protocol.samples import Message
from mopd_trainer.config.data import DataConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.data.messages import JSON, LineError, conversation, unicode_text

#: Key of a row's messages for all of its teachers, or of a mapping from names to messages.
TEACHER_MESSAGES = "teacher_messages"
#: Keys of a conversation as a mapping of lists, which names no teachers.
_COLUMNS = frozenset(("role", "content", "from", "value"))


def prompt_keys(settings: Mapping[str, TeacherConfig]) -> set[str]:
    """Return the keys of rows that teachers' prompts are read from."""
    named = (key for each in settings.values() for key in (each.prompt_key, each.append_key))
    return {TEACHER_MESSAGES, *(key for key in named if key is not None)}


def teacher_prompts(
    row: JSON,
    student: Sequence[Message],
    teachers: Iterable[str],
    known: Collection[str],
    settings: Mapping[str, TeacherConfig],
    config: DataConfig,
) -> dict[str, tuple[Message, ...]]:
    """Return the messages of each teacher that sees others than the student.

    Args:
        student: the student's messages.
        teachers: of the row; their fallbacks are included.
        known: teachers that a row may name; empty if rows name none.
        config: of the data.

    Raises:
        LineError: for a teacher with two prompts or without its column, and for invalid messages.
    """
    names = [*teachers]
    for name in names:
        fallback = settings[name].fallback if name in settings else None
        if fallback is not None and fallback not in names:
            names.append(fallback)
    by_line = _of_line(row, names, known, config)
    prompts: dict[str, tuple[Message, ...]] = {}
    for name in names:
        messages = by_line.get(name)
        if name in settings:
            messages = _configured(row, student, messages, name, settings[name], config)
        if messages is not None and tuple(messages) != tuple(student):
            prompts[name] = tuple(messages)
    return prompts


def _of_line(
    row: JSON, names: Sequence[str], known: Collection[str], config: DataConfig
) -> dict[str, list[Message]]:
    """Return the messages of ``teacher_messages`` by teacher."""
    value: Any = row.get(TEACHER_MESSAGES)
    if value is None:
        return {}
    if not isinstance(value, dict) or _COLUMNS.issuperset(value):  # pyright: ignore[reportUnknownArgumentType]
        return dict.fromkeys(names, _messages(value, TEACHER_MESSAGES, config))
    # A column of parquet has the teachers of all its rows, with null for the others.
    entries: dict[Any, Any] = {k: each for k, each in value.items() if each is not None}  # pyright: ignore[reportUnknownVariableType]
    unknown = sorted({str(name) for name in entries}.difference(known))
    if unknown and known:
        raise LineError(
            f"{TEACHER_MESSAGES!r}: unknown teacher (found {unknown[0]!r}, expected "
            f"{', '.join(sorted(known))})"
        )
    keys = {str(name): f"{TEACHER_MESSAGES}.{name}" for name in entries}
    return {name: _messages(entries[name], key, config) for name, key in keys.items()}


def _configured(
    row: JSON,
    student: Sequence[Message],
    of_line: Sequence[Message] | None,
    name: str,
    settings: TeacherConfig,
    config: DataConfig,
) -> list[Message]:
    """Return the messages of the line, or the student's, with the teacher's settings applied."""
    changed = [*(student if of_line is None else of_line)]
    key = settings.prompt_key
    if key is not None:
        if of_line is not None:
            raise LineError(
                f"teacher {name!r}: two prompts (found {TEACHER_MESSAGES!r} and prompt_key "
                f"{key!r}, expected one)",
                ignored_keys=[TEACHER_MESSAGES],
            )
        value = _column(row, key, name, "prompt_key")
        changed = _messages(value, key, config)
    if settings.system_prompt is not None:
        system = Message(role="system", content=settings.system_prompt)
        changed = [system, *(each for each in changed if each.role != "system")]
    if settings.append_key is not None:
        value = _column(row, settings.append_key, name, "append_key")
        text = unicode_text(value, repr(settings.append_key))
        last = max((n for n, each in enumerate(changed) if each.role == "user"), default=None)
        if last is None:
            raise LineError(f"teacher {name!r}: no user message to append to (append_key)")
        content = f"{changed[last].content}\n\n{text}"
        changed[last] = changed[last].model_copy(update={"content": content})
    return changed


def _column(row: JSON, key: str, name: str, setting: str) -> Any:
    """Return the value of a column that a teacher's prompt needs."""
    value = row.get(key)
    if value is None or value == "":
        raise LineError(
            f"teacher {name!r}: no {key!r}, which teachers.{name}.{setting} names (found keys "
            f"{', '.join(sorted(row))})"
        )
    return value


def _messages(value: Any, key: str, config: DataConfig) -> list[Message]:
    """Read a list of messages, or a text as the user message, with a message to complete.

    Raises:
        LineError: for other values, and if the last message is empty or the assistant's.
    """
    if isinstance(value, str) and key != TEACHER_MESSAGES:
        messages = [Message(role="user", content=unicode_text(value, repr(key)))]
    elif value == []:
        raise LineError(f"{key!r}: no messages, expected a list of messages")
    else:
        messages = conversation(value, key, config)
    if messages[-1].role == "assistant" or not messages[-1].content.strip():
        raise LineError(f"{key!r}: the last message is empty or the assistant's, expected another")
    return messages
