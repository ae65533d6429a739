"""Prompts from JSONL, each with the teachers who will judge its answer, and their order."""

import json
import logging
from collections.abc import Iterable, Sequence
from math import inf
from sys import float_info
from typing import Any

import numpy as np
from pydantic import ValidationError

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Message, Prompt
from mopd_trainer.config.run import DataConfig

logger = logging.getLogger(__name__)

#: Keys that name a line's teacher when the configuration does not say which one does.
TEACHER_KEYS = ("teacher", "data_source", "tag", "dataset")

JSON = dict[str, Any]


def read_prompts(config: DataConfig, teachers: Iterable[str]) -> list[Prompt]:
    """Every line of the data as a prompt; where ``on_bad_line`` is ``skip``, every usable one.

    Args:
        teachers: names of those who judge completions; none where nothing is judged.

    Raises:
        DataError: names the file and the line: not JSON, no question, no answer where the run
            learns from answers, an unknown teacher or none.
    """
    path, known = config.prompts, sorted(teachers)
    bad: list[DataError] = []
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected prompts as JSONL (data.prompts)")
    prompts: list[Prompt] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    prompts.append(_prompt(line, len(prompts), config, known, f"{path}:{number}"))
                except DataError as error:
                    if config.on_bad_line == "fail":
                        raise
                    bad.append(error)
    if bad:
        logger.warning("%s: %d lines skipped, the first because %s", path, len(bad), bad[0])
    if not prompts:
        raise DataError(f"{path}: no prompts in it; expected one JSON object a line")
    return prompts


class PromptOrder:
    """Which prompts a step takes: epoch after epoch, each in its own seeded order.

    The order is a function of the step alone, so a resumed run needs to remember nothing.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, prompts_per_step: int, seed: int, shuffle: bool
    ) -> None:
        self._prompts = prompts
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of a step, counted from 0."""
        first = step * self._prompts_per_step
        positions = range(first, first + self._prompts_per_step)
        count = len(self._prompts)
        orders = {epoch: self._order(epoch) for epoch in {at // count for at in positions}}
        return [self._prompts[orders[at // count][at % count]] for at in positions]

    def _order(self, epoch: int) -> Sequence[int]:
        count = len(self._prompts)
        if not self._shuffle:
            return range(count)
        return np.random.default_rng([self._seed, epoch]).permutation(count).tolist()


def _prompt(
    line: bytes, index: int, config: DataConfig, known: Sequence[str], where: str
) -> Prompt:
    values = _parse(line, where)
    messages, answer = _question_and_answer(values, config, where)
    return Prompt(
        index=index,
        messages=messages,
        teachers=_teachers(values, config, known, where) if known else {},
        metadata=_metadata(values, config),
        answer=answer,
    )


def _parse(line: bytes, where: str) -> JSON:
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or a deep nest
        raise DataError(f"{where}: JSON that cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise DataError(f"{where}: found a {type(values).__name__}, expected a JSON object")
    return values  # pyright: ignore[reportUnknownVariableType]


def _question_and_answer(
    values: JSON, config: DataConfig, where: str
) -> tuple[tuple[Message, ...], str | None]:
    turns, answer = _messages(values, config, where), None
    if config.uses_reference_answers and config.answer_key is not None:
        answer = _text(values, config.answer_key, where)
    elif config.uses_reference_answers:
        turns, answer = _without_answer(turns, where)
    if not turns or turns[-1].role == "assistant":
        found = "ends with an assistant turn" if turns else "holds an answer and no question"
        raise DataError(f"{where}: 'messages' {found}; expected a turn that the student can answer")
    return turns, answer


def _without_answer(turns: tuple[Message, ...], where: str) -> tuple[tuple[Message, ...], str]:
    *question, answer = turns
    if answer.role != "assistant" or not answer.content:
        raise DataError(
            f"{where}: no reference answer (the last turn is of role {answer.role!r} and has "
            f"{len(answer.content)} characters); expected 'messages' that end with an assistant "
            "turn, or set data.answer_key"
        )
    return tuple(question), answer.content


def _messages(values: JSON, config: DataConfig, where: str) -> tuple[Message, ...]:
    if config.question_key is not None:
        return (Message(role="user", content=_text(values, config.question_key, where)),)
    if "messages" in values:
        try:
            messages = tuple(Message.model_validate(message) for message in values["messages"])
        except (ValidationError, TypeError) as error:
            raise DataError(
                f"{where}: 'messages' is not a list of {{role, content}} with text in both"
            ) from error
        if not messages:
            raise DataError(f"{where}: 'messages' is empty; expected at least one turn")
        for at, message in enumerate(messages):
            if not _is_unicode(message.role + message.content):
                raise DataError(f"{where}: turn {at + 1} of 'messages' holds half a character")
        return messages
    if "prompt" in values:
        return (Message(role="user", content=_text(values, "prompt", where)),)
    raise DataError(
        f"{where}: found keys {', '.join(sorted(values)) or 'none'}; expected 'messages' or "
        "'prompt', or set data.question_key"
    )


def _text(values: JSON, key: str, where: str) -> str:
    text = values.get(key)
    if not isinstance(text, str) or not text or not _is_unicode(text):
        raise DataError(f"{where}: {key!r} is {text!a}; expected text")
    return text


def _is_unicode(text: str) -> bool:
    """Whether it has bytes: JSON can spell half of a character, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _teachers(
    values: JSON, config: DataConfig, known: Sequence[str], where: str
) -> dict[str, float]:
    keys = TEACHER_KEYS if config.teacher_key is None else (config.teacher_key,)
    key = next((key for key in keys if values.get(key) is not None), None)
    named: Any = values[key] if key else config.default_teacher
    if named is None and len(known) == 1:
        named = known[0]  # one teacher is no choice
    if named is None:
        raise DataError(
            f"{where}: no {' or '.join(repr(key) for key in keys)}; known teachers are "
            f"{', '.join(known)} (data.default_teacher takes lines that name none)"
        )
    weights = _weights(named, where)
    for name in weights:
        if name not in known:
            raise DataError(
                f"{where}: teacher {name!r} is unknown; known teachers are {', '.join(known)}"
            )
    return weights


def _weights(named: Any, where: str) -> dict[str, float]:
    if isinstance(named, str):
        return {named: 1.0}
    if isinstance(named, dict) and named:
        weights: dict[Any, Any] = dict(named)  # pyright: ignore[reportUnknownArgumentType]
        # A JSON integer may be larger than any float.
        if all(isinstance(w, int | float) and 0 < w <= float_info.max for w in weights.values()):
            found = {str(name): float(weight) for name, weight in weights.items()}
            if sum(found.values()) < inf:
                return found
    raise DataError(
        f"{where}: teachers are given as {named!r}; expected a name, or names with weights above 0"
    )


def _metadata(values: JSON, config: DataConfig) -> JSON:
    if config.answer_key is None or config.answer_key not in values:
        return {}
    return {"answer": values[config.answer_key]}
