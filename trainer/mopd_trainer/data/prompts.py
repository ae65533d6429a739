"""Prompts from rows of data, each with its teachers, and their order."""

import json
import logging
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from math import inf
from sys import float_info
from typing import Any

import numpy as np
from pydantic import ValidationError

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Message, Prompt
from mopd_trainer.config.run import DataConfig
from mopd_trainer.data.rows import Row, read_rows

logger = logging.getLogger(__name__)

#: Keys of a line's teacher if ``teacher_key`` is not set.
TEACHER_KEYS = ("teacher", "data_source", "tag", "dataset")

#: Keys that are always known.
_KEYS = ("messages", "prompt", *TEACHER_KEYS)

#: Keys by which other programs change the rendered prompt.
RENDERING_KEYS = ("chat_template_kwargs", "documents", "functions", "images", "system", "tools")

JSON = dict[str, Any]


def read_prompts(
    config: DataConfig, teachers: Iterable[str], *, keep_lines: bool = False
) -> list[Prompt]:
    """Load the prompts of a data file; with ``on_bad_line: skip``, invalid rows are dropped.

    Args:
        teachers: names of the scoring teachers; empty for plain SFT.
        keep_lines: keep each complete row as the prompt's metadata; unknown keys are valid, except
            those that would change the rendered prompt.

    Raises:
        DataError: for a missing or empty file, and for an invalid row: no JSON object, unknown
            keys, no prompt, no reference answer if the run uses them, no teacher or an unknown
            one. ``key`` is ``file`` or ``file:row``.
        MissingPackageError: as ``read_rows``.
    """
    path, known = config.prompts, sorted(teachers)
    errors: list[DataError] = []
    prompts: list[Prompt] = []
    for where, row in read_rows(config):
        try:
            prompts.append(_prompt(row, len(prompts), config, known, keep_lines))
        except _LineError as error:
            errors.append(DataError(f"{where}: {error}", key=where))
            if config.on_bad_line == "fail":
                raise errors[0] from error
    if errors:
        logger.warning("%s: skipped %d invalid lines, the first: %s", path, len(errors), errors[0])
    if not prompts:
        raise DataError(
            f"{path}: no prompts found, expected one JSON object per line", key=str(path)
        )
    return prompts


class PromptOrder:
    """Prompts of each step: epochs with a seeded order, as a function of the step.

    A resumed run therefore needs no saved state.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, prompts_per_step: int, seed: int, shuffle: bool
    ) -> None:
        self._prompts = prompts
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle

    def batch(self, step: int) -> list[Prompt]:
        """Return the prompts of a step (from 0)."""
        first = step * self._prompts_per_step
        positions = range(first, first + self._prompts_per_step)
        count = len(self._prompts)
        orders = {epoch: self._order(epoch) for epoch in {p // count for p in positions}}
        return [self._prompts[orders[p // count][p % count]] for p in positions]

    def _order(self, epoch: int) -> Sequence[int]:
        count = len(self._prompts)
        if not self._shuffle:
            return range(count)
        return np.random.default_rng([self._seed, epoch]).permutation(count).tolist()


class _LineError(ValueError):
    """An invalid line."""


def _prompt(
    row: Row, index: int, config: DataConfig, known: Sequence[str], keep_line: bool
) -> Prompt:
    values = _parse(row) if isinstance(row, bytes) else row
    _require_known_keys(values, config, keep_line)
    messages, reference = _messages_and_reference(values, config)
    metadata: JSON = values if keep_line else {}
    if not keep_line and config.answer_key is not None and config.answer_key in values:
        metadata = {"answer": values[config.answer_key]}
    return Prompt(
        index=index,
        messages=messages,
        teachers=_teachers(values, config, known) if known else {},
        metadata=metadata,
        answer=reference,
    )


def _parse(line: bytes) -> JSON:
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _LineError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise _LineError(f"not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise _LineError(f"unsupported JSON ({error})") from error
    if not isinstance(values, dict):
        raise _LineError(f"found a {type(values).__name__}, expected a JSON object")
    return values  # pyright: ignore[reportUnknownVariableType]


def _require_known_keys(values: JSON, config: DataConfig, keep_line: bool) -> None:
    """Reject keys that nothing reads; a key without a value does not count."""
    used = {config.question_key, config.answer_key, config.teacher_key, *_KEYS}
    unknown = sorted(key for key in values if key not in used and values[key] is not None)
    if keep_line:
        unknown = [key for key in unknown if key in RENDERING_KEYS]
    elif config.ignored_keys == "all":
        return
    unknown = [key for key in unknown if keep_line or key not in config.ignored_keys]
    if unknown:
        guesses = get_close_matches(unknown[0], sorted(filter(None, used)), n=1, cutoff=0.7)
        hint = f", did you mean {guesses[0]!r}" if guesses else ""
        raise _LineError(
            f"unknown keys {', '.join(unknown)}{hint} (expected {', '.join(sorted(_KEYS))} or a "
            "configured key). Name them in data.answer_key or data.question_key, remove them, or "
            "list them in data.ignored_keys."
        )


def _messages_and_reference(
    values: JSON, config: DataConfig
) -> tuple[tuple[Message, ...], str | None]:
    messages, reference = _messages(values, config), None
    if config.uses_reference_answers and config.answer_key is not None:
        reference = _text(values, config.answer_key)
    elif config.uses_reference_answers:
        *messages, last = messages
        if last.role != "assistant" or not last.content:
            raise _LineError(
                f"no reference answer (the last message has role {last.role!r} and "
                f"{len(last.content)} characters). End 'messages' with an assistant message, or "
                "set data.answer_key."
            )
        reference = last.content
    if not messages or messages[-1].role == "assistant":
        problem = "ends with an assistant message" if messages else "has no user message"
        raise _LineError(f"'messages' {problem}, expected a message to complete")
    return tuple(messages), reference


def _messages(values: JSON, config: DataConfig) -> Sequence[Message]:
    if config.question_key is not None:
        return (Message(role="user", content=_text(values, config.question_key)),)
    if "messages" in values:
        try:
            messages = [Message.model_validate(message) for message in values["messages"]]
        except (ValidationError, TypeError) as error:
            raise _LineError("'messages' is invalid, expected a list of {role, content}") from error
        if not messages:
            raise _LineError("'messages' is empty, expected at least one message")
        for number, message in enumerate(messages, 1):
            if not _is_unicode(message.role + message.content):
                raise _LineError(f"message {number} of 'messages' has half a surrogate pair")
        return messages
    if "prompt" in values:
        return (Message(role="user", content=_text(values, "prompt")),)
    raise _LineError(
        f"found keys {', '.join(sorted(values)) or 'none'}, expected 'messages' or 'prompt'. Or "
        "set data.question_key."
    )


def _text(values: JSON, key: str) -> str:
    text = values.get(key)
    if not isinstance(text, str) or not text or not _is_unicode(text):
        raise _LineError(f"{key!r}: found {text!a}, expected text")
    return text


def _is_unicode(text: str) -> bool:
    """Return False for half a surrogate pair, which JSON can represent and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _teachers(values: JSON, config: DataConfig, known: Sequence[str]) -> dict[str, float]:
    keys = TEACHER_KEYS if config.teacher_key is None else (config.teacher_key,)
    key = next((key for key in keys if values.get(key) is not None), None)
    value: Any = values[key] if key else config.default_teacher
    if value is None and len(known) == 1:
        value = known[0]
    if value is None:
        raise _LineError(
            f"no teacher (found no {' or '.join(map(repr, keys))}; known teachers: "
            f"{', '.join(known)}). Add the key, or set data.default_teacher."
        )
    weights = _weights(value)
    for name in weights:
        if name not in known:
            raise _LineError(f"unknown teacher (found {name!r}, expected {', '.join(known)})")
    return weights


def _weights(value: Any) -> dict[str, float]:
    if isinstance(value, str):
        return {value: 1.0}
    if isinstance(value, dict) and value:
        entries: dict[Any, Any] = dict(value)  # pyright: ignore[reportUnknownArgumentType]
        # A JSON integer may be larger than any float.
        if all(isinstance(w, int | float) and 0 < w <= float_info.max for w in entries.values()):
            weights = {str(name): float(weight) for name, weight in entries.items()}
            if sum(weights.values()) < inf:
                return weights
    raise _LineError(f"teachers: found {value!r}, expected a name, or names with weights above 0")
