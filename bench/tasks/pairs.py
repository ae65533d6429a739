"""Teachers, student and budget of the tasks: one teacher, and several at once."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from bench.numerals.pairs import CEILING, ONE_TOKENIZER_LOSSES, SFT, Pair, Side
from bench.numerals.warm_start import Completion
from bench.tasks.exercises import (
    ChineseDates,
    CodeBlocks,
    Dates,
    GermanNumbers,
    HindiDates,
    IsoDates,
    Mixture,
    Rows,
    Subtraction,
    TextTask,
    Times,
)
from bench.tasks.task_tokenizers import (
    byte_pair_tokenizer,
    character_tokenizer,
    chinese_tokenizer,
    digit_tokenizer,
    free_tokenizer,
    hindi_tokenizer,
    instruct_tokenizer,
    phrase_tokenizer,
    student_tokenizer,
    syllable_tokenizer,
    times_tokenizer,
    unigram_tokenizer,
    unigram_word_tokenizer,
    word_tokenizer,
)
from mopd.demo.models import Family

TASKS: Mapping[str, TextTask] = {
    "dates": Dates(),
    "iso_dates": IsoDates(),
    "subtraction": Subtraction(),
    "rows": Rows(),
    "chinese_dates": ChineseDates(),
    "hindi_dates": HindiDates(),
    "german_numbers": GermanNumbers(),
    "code_blocks": CodeBlocks(),
    "times": Times(),
}
#: Most tokens of a completion in any of the tokenizers.
_MAX_NEW_TOKENS: Mapping[str, int] = {
    "dates": 20,
    "iso_dates": 20,
    "subtraction": 8,
    "rows": 64,
    "chinese_dates": 48,
    "hindi_dates": 28,
    "german_numbers": 56,
    "code_blocks": 64,
    "times": 48,
}
_ANY_TOKENIZER = ("prefix_kl", "ctkd", "gold_bayesian", "simct", "alm", CEILING, SFT)
LOSSES = (*_ANY_TOKENIZER, *ONE_TOKENIZER_LOSSES, "auto")


def _teacher(
    task: str, tokenizer: Callable[[], PreTrainedTokenizerFast], family: Family, steps: int
) -> Side:
    return Side(
        family=family,
        tokenizer=tokenizer,
        task=TASKS[task],
        steps=steps,
        examples_per_step=64,
        # A teacher scores wrong beginnings, and must continue them correctly.
        corruption=0.0 if task == "subtraction" else 0.15,
        misreading=0.1 if task == "subtraction" else 0.0,
        learning_rate=2e-3,
        max_new_tokens=_MAX_NEW_TOKENS[task],
    )


_STEPS: Mapping[str, int] = {
    "dates": 1_000,
    "iso_dates": 1_000,
    "subtraction": 2_500,
    "rows": 1_000,
    "german_numbers": 1_000,
    "code_blocks": 1_000,
    "times": 1_000,
}
_TEACHERS: Mapping[str, Side] = {
    "dates": _teacher("dates", unigram_tokenizer, "qwen3", _STEPS["dates"]),
    "iso_dates": _teacher("iso_dates", digit_tokenizer, "llama", _STEPS["iso_dates"]),
    "subtraction": replace(
        _teacher("subtraction", digit_tokenizer, "llama", _STEPS["subtraction"]),
        task=Subtraction(complete=True),
    ),
    "rows": _teacher("rows", free_tokenizer, "qwen3", _STEPS["rows"]),
    "german_numbers": _teacher(
        "german_numbers", syllable_tokenizer, "qwen3", _STEPS["german_numbers"]
    ),
    "code_blocks": _teacher("code_blocks", phrase_tokenizer, "llama", _STEPS["code_blocks"]),
    "times": _teacher("times", times_tokenizer, "qwen3", _STEPS["times"]),
    "hindi_dates": _teacher("hindi_dates", byte_pair_tokenizer, "qwen3", 1_000),
}
#: A teacher that spells Chinese characters by bytes, and one that has a token for each.
_BYTES = {"chinese_dates": _teacher("chinese_dates", unigram_tokenizer, "qwen3", 1_000)}
_CHARACTERS = {"chinese_dates": _teacher("chinese_dates", character_tokenizer, "qwen3", 1_000)}


def _student(
    examples_per_step: int,
    learning_rate: float,
    *slowest_first: str,
    tokenizer: Callable[[], PreTrainedTokenizerFast] = student_tokenizer,
    **completion: Any,
) -> Side:
    """Return a student trained on reference answers until 10 to 20 % of each task are correct.

    Args:
        completion: see ``Completion``.
    """
    tasks = tuple(TASKS[name] for name in slowest_first)
    return Side(
        family="gpt_neox",
        tokenizer=tokenizer,
        task=Mixture(tasks),
        steps=1_500,
        examples_per_step=examples_per_step,
        learning_rate=learning_rate,
        max_new_tokens=max(_MAX_NEW_TOKENS[name] for name in slowest_first),
        completion=Completion(tasks, **completion),
    )


_SHORT = _student(64, 2e-3, "subtraction", "dates")
_DATES = _student(64, 2e-3, "dates", "iso_dates", at_once=True)
_LONG = _student(48, 1e-3, "rows")
_CHINESE_BYTES = _student(64, 1e-3, "chinese_dates")  # three tokens for a character
_WRITTEN_OUT = _student(
    64,
    1e-3,
    "german_numbers",
    "code_blocks",
    tokenizer=word_tokenizer,
    least=0.04,
    most=0.45,
    at_once=True,
)
_UNIGRAM_TIMES, _UNIGRAM_DATES = (
    _student(64, 1e-3, task, tokenizer=unigram_word_tokenizer, least=0.04, most=0.45, at_once=True)
    for task in ("times", "dates")
)
#: A teacher of single digits, for a student with a Unigram vocabulary.
_DIGITS = {"dates": _teacher("dates", digit_tokenizer, "llama", _STEPS["dates"])}
_HINDI = _student(64, 1e-3, "hindi_dates", tokenizer=hindi_tokenizer)
_CHINESE = replace(_CHINESE_BYTES, tokenizer=chinese_tokenizer)


def _own(teacher: Side, student: Side) -> Side:
    """Return the teacher with the student's tokenizer."""
    return replace(teacher, tokenizer=student.tokenizer)


def _pair(
    student: Side,
    *tasks: str,
    name: str = "",
    teachers: Mapping[str, Side] = _TEACHERS,
    losses: tuple[str, ...] = _ANY_TOKENIZER,
) -> Pair:
    return Pair(
        name=name or "+".join(tasks),
        title=(name or " and ".join(tasks)) + (" at once" if len(tasks) > 1 else ""),
        teachers={task: teachers[task] for task in tasks},
        ceiling={task: _own(teachers[task], student) for task in tasks},
        student=student,
        tasks={task: TASKS[task] for task in tasks},
        losses=losses,
        steps=400,
        learning_rate=1e-3,
        top_k=64,
        max_new_tokens=max(_MAX_NEW_TOKENS[task] for task in tasks),
    )


_PAIRS = (
    _pair(_SHORT, "dates", "subtraction"),
    _pair(_SHORT, "dates"),
    _pair(_SHORT, "subtraction"),
    _pair(_LONG, "rows"),
    _pair(_DATES, "dates", "iso_dates"),
    _pair(_DATES, "iso_dates"),
    _pair(_DATES, "dates", name="dates_alone"),
    _pair(_WRITTEN_OUT, "german_numbers", "code_blocks"),
    _pair(_WRITTEN_OUT, "german_numbers"),
    _pair(_WRITTEN_OUT, "code_blocks"),
    _pair(_UNIGRAM_TIMES, "times"),
    _pair(_UNIGRAM_DATES, "dates", name="dates_to_unigram", teachers=_DIGITS),
    _pair(
        _SHORT,
        "dates",
        name="dates_own_tokenizer",
        teachers={"dates": _own(_TEACHERS["dates"], _SHORT)},
        losses=(*ONE_TOKENIZER_LOSSES, CEILING),
    ),
    replace(
        _pair(
            _student(64, 2e-3, "dates"),
            "dates",
            name="dates_from_instruct",
            teachers={"dates": replace(_TEACHERS["dates"], tokenizer=instruct_tokenizer)},
            losses=("auto",),
        ),
        title="dates, base student and instruct teacher",
        corrections=None,
    ),
    _pair(_CHINESE, "chinese_dates", name="chinese_from_bytes", teachers=_BYTES),
    _pair(_CHINESE_BYTES, "chinese_dates", name="chinese_from_characters", teachers=_CHARACTERS),
    _pair(_HINDI, "hindi_dates"),
)
PAIRS: Mapping[str, Pair] = {pair.name: pair for pair in _PAIRS}
