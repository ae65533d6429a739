"""Prompts from rows of data, each with its teachers, and their order."""

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import inf
from sys import float_info
from types import MappingProxyType
from typing import Any

import numpy as np

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Message, Prompt, later_turn
from mopd_trainer.config.run import DataConfig, RewardConfig, RunConfig, TeacherConfig
from mopd_trainer.data.formats import (
    TEACHER_KEYS,
    format_of,
    read_turns,
    require_known_keys,
)
from mopd_trainer.data.messages import (
    JSON,
    EmptyPromptError,
    LineError,
    tools_of,
)
from mopd_trainer.data.rows import Row, read_rows
from mopd_trainer.data.teacher_prompts import TEACHER_MESSAGES, prompt_keys, teacher_prompts
from mopd_trainer.data.turns import Turn, all_turns, last_turn

logger = logging.getLogger(__name__)

#: Line numbers in a message.
_LISTED = 8
#: Settings of no teacher.
_NONE: Mapping[str, TeacherConfig] = MappingProxyType({})
#: Key of the logged reference answer in a prompt's metadata.
_REFERENCE = "answer"


def training_prompts(config: RunConfig) -> list[Prompt]:
    """Load the prompts of a run, with the reference answers of its rewards.

    Raises:
        DataError: as ``read_prompts``, and for a prompt without the reference answer of a reward.
        MissingPackageError: as ``read_rows``.
    """
    prompts = read_prompts(config.data, config.scoring_teachers, kept_keys=config.reward_keys)
    for name, reward in config.rewards.items():
        missing = [p.index for p in prompts if reward_reference(p, reward) is None]
        if missing and not reward.is_function:
            raise DataError(
                f"rewards.{name}: {config.data.prompts}: prompt {missing[0]} has no reference "
                f"answer (found none for {len(missing):,} of {len(prompts):,} prompts). Set "
                f"rewards.{name}.answer_key.",
                key=f"rewards.{name}.answer_key",
            )
    return prompts


def reward_reference(prompt: Prompt, reward: RewardConfig) -> Any:
    """Return the reference of a prompt for a reward; None without one."""
    if reward.answer_key is not None:
        return prompt.metadata.get(reward.answer_key)
    return prompt.metadata.get(_REFERENCE, prompt.answer)


def read_prompts(
    config: DataConfig,
    teachers: Iterable[str] | Mapping[str, TeacherConfig],
    *,
    unrouted: Mapping[str, TeacherConfig] = _NONE,
    keep_rows: bool = False,
    kept_keys: Collection[str] = (),
    section: str = "data",
) -> list[Prompt]:
    """Load the prompts of a data file; with ``on_bad_line: skip``, invalid rows are dropped.

    Args:
        teachers: names of the scoring teachers, or their settings by name, which their own
            prompts need; empty for plain SFT.
        unrouted: teachers of every row, which the rows do not name.
        keep_rows: keep each complete row as the prompt's metadata; unknown keys are valid, except
            those that would change the rendered prompt.
        kept_keys: keys to keep in the prompt's metadata.
        section: of the settings that errors name.

    Raises:
        DataError: for a missing or empty file, and for an invalid row: no JSON object, unknown
            keys, no prompt, no reference answer if the run uses them, no teacher or an unknown
            one. ``key`` is ``file`` or ``file:row``. Empty prompts are counted first.
        MissingPackageError: as ``read_rows``.
    """
    path = config.prompts
    bad: dict[int, str] = {}
    empty = 0
    prompts: list[Prompt] = []
    for number, each in _prompts_or_errors(
        config, teachers, unrouted, kept_keys, keep_rows=keep_rows
    ):
        if isinstance(each, Prompt):
            prompts.append(each)
            continue
        bad[number] = f"{path}:{number}: {each}. {_fix(each, config, section)}"
        if isinstance(each, EmptyPromptError):
            empty += 1
        elif config.on_bad_line == "fail":
            raise DataError(bad[number], key=f"{path}:{number}") from each
    if bad and config.on_bad_line == "fail":
        first = next(iter(bad))
        skip = f", or set {section}.on_bad_line=skip" if section == "data" else ""
        raise DataError(
            f"{path}:{first}: empty prompt, one of {empty:,} in {len(prompts) + empty:,} rows "
            f"({_listed(bad)}). Remove them{skip}.",
            key=f"{path}:{first}",
        )
    if bad:
        logger.warning(
            "%s: skipped %d invalid lines (%s; %d empty prompts), the first: %s",
            path,
            len(bad),
            _listed(bad),
            empty,
            next(iter(bad.values())),
        )
    if not prompts:
        raise DataError(
            f"{path}: no prompts found, expected one JSON object per line", key=str(path)
        )
    return prompts


def stream_prompts(
    config: DataConfig,
    teachers: Iterable[str] | Mapping[str, TeacherConfig],
    *,
    unrouted: Mapping[str, TeacherConfig] = _NONE,
) -> Iterator[tuple[int, Prompt]]:
    """Yield the number of each row, from 1, and its prompt, without loading the data at once.

    With ``on_bad_line: skip``, invalid rows are not yielded. Arguments as ``read_prompts``.

    Raises:
        DataError: for a missing file, and for the first invalid row.
        MissingPackageError: as ``read_rows``.
    """
    path = config.prompts
    for number, each in _prompts_or_errors(config, teachers, unrouted):
        if isinstance(each, Prompt):
            yield number, each
        elif config.on_bad_line == "fail":
            fix = _fix(each, config, "data")
            raise DataError(f"{path}:{number}: {each}. {fix}", key=f"{path}:{number}") from each


def _prompts_or_errors(
    config: DataConfig,
    teachers: Iterable[str] | Mapping[str, TeacherConfig],
    unrouted: Mapping[str, TeacherConfig],
    kept_keys: Collection[str] = (),
    *,
    keep_rows: bool = False,
) -> Iterator[tuple[int, Prompt | LineError]]:
    settings = {**unrouted, **(teachers if isinstance(teachers, Mapping) else {})}
    reader = _RowReader(config, sorted(teachers), unrouted, settings, kept_keys, keep_rows)
    index = 0
    for number, row in read_rows(config):
        try:
            prompts = reader.prompts(row, index)
        except LineError as error:
            yield number, error
        else:
            index += len(prompts)
            yield from ((number, prompt) for prompt in prompts)


def _fix(error: LineError, config: DataConfig, section: str) -> str:
    """Return the settings that make a line valid, as they are written on the command line."""
    settings = dict(error.settings)
    if isinstance(config.ignored_keys, tuple) and "ignored_keys" in settings:
        settings["ignored_keys"] = [*config.ignored_keys, *settings["ignored_keys"]]
    if not settings:
        skip = f", or set {section}.on_bad_line=skip" if section == "data" else ""
        return f"Fix the line{skip}."
    texts = {k: v if isinstance(v, str) else f"[{','.join(v)}]" for k, v in settings.items()}
    return f"Set {' '.join(f'{section}.{name}={text}' for name, text in texts.items())}."


def _listed(numbers: Collection[int]) -> str:
    text = ", ".join(map(str, islice(numbers, _LISTED)))
    more = len(numbers) - _LISTED
    return f"{'line' if len(numbers) == 1 else 'lines'} {text}" + (
        f" and {more:,} more" if more > 0 else ""
    )


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


@dataclass(frozen=True, eq=False)
class _RowReader:
    """Rows of a file to prompts."""

    config: DataConfig
    known: Sequence[str]
    """Teachers that rows may name."""
    unrouted: Collection[str]
    """Teachers of every row, which the rows do not name."""
    settings: Mapping[str, TeacherConfig]
    """Settings of all teachers, for their prompts."""
    kept_keys: Collection[str]
    keep_rows: bool

    @cached_property
    def _other_keys(self) -> set[str]:
        """Keys that are read besides those of the format."""
        return prompt_keys(self.settings) | {*self.kept_keys}

    def prompts(self, row: Row, index: int) -> list[Prompt]:
        """Return the prompts of a row: one, or with ``data.turns: all`` one per turn."""
        config = self.config
        columns = _parse(row) if isinstance(row, bytes) else row
        if not isinstance(columns, dict):  # pyright: ignore[reportUnnecessaryIsInstance]  # of an array
            raise LineError(f"found a {type(columns).__name__}, expected a JSON object")
        values = columns
        if config.ignored_keys and config.ignored_keys != "all":
            read = (config.question_key, config.answer_key, config.teacher_key)
            values = {k: v for k, v in columns.items() if k in read or k not in config.ignored_keys}
        spelling = format_of(values, config)
        try:
            require_known_keys(
                values, spelling, config, keep_row=self.keep_rows, others=self._other_keys
            )
            messages, reference = read_turns(values, spelling, config)
            if config.turns == "all":
                turns = all_turns(messages, reference, config)
            else:
                turns = [last_turn(values, messages, reference, spelling, config)]
            prompts = [
                Prompt(
                    index=index + number,
                    messages=turn.messages,
                    teachers=_teachers(_routed(values, turn, config), config, self.known),
                    metadata=columns if self.keep_rows else self._metadata(turn, columns),
                    answer=turn.text,
                    format=spelling.name,
                    tools=tools_of(values),
                    reply=turn.reply(config),
                    turn=number,
                    conversation=index,
                )
                for number, turn in enumerate(turns)
            ]
        except LineError as error:
            error.args = (f"format {spelling.name}: {error}",)
            raise
        if TEACHER_MESSAGES not in values:  # ignored
            columns = {**columns, TEACHER_MESSAGES: None}
        return [self._with_teacher_messages(each, prompts[0].messages, columns) for each in prompts]

    def _metadata(self, turn: Turn, columns: JSON) -> JSON:
        kept = {key: columns[key] for key in self.kept_keys if key in columns}
        return kept if turn.logged is None else {_REFERENCE: turn.logged} | kept

    def _with_teacher_messages(
        self, prompt: Prompt, first: tuple[Message, ...], columns: JSON
    ) -> Prompt:
        """Give teachers their own messages, in place of the student's of the first turn."""
        names = [*prompt.teachers, *self.unrouted]
        own = teacher_prompts(columns, first, names, self.known, self.settings, self.config)
        if not own:
            return prompt
        beginning = replace(prompt, messages=first, teacher_messages=own)
        return later_turn(beginning, prompt.messages)


def _parse(line: bytes) -> JSON:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise LineError(f"not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise LineError(f"unsupported JSON ({error})") from error


def _routed(values: JSON, turn: Turn, config: DataConfig) -> JSON:
    """Return the row with the teacher of a turn, if it has its own."""
    if turn.teacher is None:
        return values
    return {**values, config.teacher_key or TEACHER_KEYS[0]: turn.teacher}


def _teachers(values: JSON, config: DataConfig, known: Sequence[str]) -> dict[str, float]:
    if not known:
        return {}
    keys = TEACHER_KEYS if config.teacher_key is None else (config.teacher_key,)
    key = next((key for key in keys if values.get(key) is not None), None)
    value: Any = values[key] if key else config.default_teacher
    if value is None and len(known) == 1:
        value = known[0]
    if value is None:
        raise LineError(
            f"no teacher (found no {' or '.join(map(repr, keys))}; known teachers: "
            f"{', '.join(known)})",
            default_teacher=known[0],
        )
    weights = _weights(value)
    for name in weights:
        if name not in known:
            # The column may name something else, as the data's source.
            settings = {} if key is None or config.teacher_key else {"ignored_keys": [key]}
            if settings and config.default_teacher is None and len(known) > 1:
                settings |= {"default_teacher": known[0]}
            raise LineError(
                f"unknown teacher (found {name!r}, expected {', '.join(known)})", **settings
            )
    return weights


def _weights(value: Any) -> dict[str, float]:
    if isinstance(value, str):
        return {value: 1.0}
    if isinstance(value, dict) and value:
        # A column of parquet has the teachers of all its rows, with null for the others.
        entries: dict[Any, Any] = {k: w for k, w in value.items() if w is not None}  # pyright: ignore[reportUnknownVariableType]
        # A JSON integer may be larger than any float.
        if all(isinstance(w, int | float) and 0 < w <= float_info.max for w in entries.values()):
            weights = {str(name): float(weight) for name, weight in entries.items()}
            if sum(weights.values()) < inf:
                return weights
    raise LineError(f"teachers: found {value!r}, expected a name, or names with weights above 0")
