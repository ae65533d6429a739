"""``Turn``: a message of the assistant to train, with the conversation before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mopd_protocol.messages import Message, calls_as_text
from mopd_trainer.config.data import DataConfig
from mopd_trainer.data.formats import Format, completion
from mopd_trainer.data.messages import JSON, LineError, RoutedMessage


@dataclass(frozen=True)
class Turn:
    """The conversation before a turn, and its reference answer if the run trains on it."""

    messages: tuple[Message, ...]
    reference: Message | None
    logged: Any = None  # reference answer in the logs, if the run does not train on it
    teacher: Any = None  # of this turn: a name, or names with weights

    @property
    def text(self) -> str | None:
        """The reference answer as text, for logs."""
        return None if self.reference is None else calls_as_text(self.reference).content

    def reply(self, config: DataConfig) -> Message | None:
        """Return the reference answer if the student's template has to render it: it has more than
        a text, or is one of several turns."""
        reference = self.reference
        if reference is None or config.turns == "all":
            return reference
        return reference if reference.tool_calls or reference.thinking else None


def last_turn(
    values: JSON,
    messages: Sequence[Message],
    reference: Message | None,
    spelling: Format,
    config: DataConfig,
) -> Turn:
    """Return the turn that completes a row.

    Raises:
        LineError: if the run needs a reference answer and there is none, or there are two.
    """
    key = config.answer_key
    text = None if reference is None else calls_as_text(reference).content
    logged = text if key is None else values.get(key)
    if not config.uses_reference_answers:
        return Turn(tuple(messages), None, logged)
    if key is not None:
        configured = completion(values, key, config)
        if reference not in (None, configured):
            raise LineError(f"two reference answers ({spelling.reference} and {key!r})")
        reference = configured
    if reference is None:
        expected = spelling.reference if key is None else repr(key)
        raise LineError(f"no reference answer (expected {expected} with text)")
    return Turn(tuple(messages), reference, None if key is None else logged)


def all_turns(
    messages: Sequence[Message], reference: Message | None, config: DataConfig
) -> list[Turn]:
    """Return the turns of a conversation: those of the assistant after the first message that is
    no system message, and the one that completes it, if the student samples completions.

    Raises:
        LineError: if there is none, or one follows another.
    """
    whole = [*messages, *([] if reference is None else [reference])]
    context = next(n for n, each in enumerate(whole) if each.role not in ("system", "assistant"))
    places = [n for n, each in enumerate(whole) if each.role == "assistant" and n > context]
    if any(place + 1 in places for place in places):
        raise LineError("two assistant messages in succession, expected another one between them")
    plain = tuple(_unrouted(each) for each in whole)
    used = config.uses_reference_answers
    turns = [
        Turn(
            plain[:place],
            plain[place] if used else None,
            None if used else calls_as_text(plain[place]).content,
            each.teacher if isinstance(each := whole[place], RoutedMessage) else None,
        )
        for place in places
    ]
    if not used and reference is None:
        turns.append(Turn(plain, None))
    if not turns:
        raise LineError("no reference answer (expected an assistant message)")
    return turns


def _unrouted(message: Message) -> Message:
    if not isinstance(message, RoutedMessage):
        return message
    return Message.model_validate(message.model_dump())
