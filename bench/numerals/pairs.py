"""Compared pairs of teacher and student, and the losses between them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerFast

from bench.numerals.exercises import Sums, Task, WordLists
from bench.numerals.numeral_tokenizers import (
    STUDENT_NAMES,
    TEACHER_NAMES,
    ControlNames,
    digit_tokenizer,
    numeral_tokenizer,
)
from bench.numerals.warm_start import Completion
from mopd.demo.demo_tokenizers import student_tokenizer, words_teacher_tokenizer
from mopd.demo.models import Family
from mopd_losses import LossConfig
from mopd_trainer import ImportanceConfig

#: The baseline: cross entropy on reference answers, with the same steps and prompts.
SFT = "sft"
#: The loss of teachers with the student's own tokenizer: what the transfer could reach.
CEILING = "topk_kl"
#: X-Token's P-KL, which is no loss of ``mopd train``.
PKL_PARITY = "pkl_parity"

_SETTINGS: dict[str, Mapping[str, Any]] = {
    "prefix_kl": {"type": "prefix_kl"},
    "ctkd": {"type": "ctkd"},
    "topk_kl": {"type": "topk_kl"},
    "gold": {"type": "gold", "merge": "observed"},  # as published
    "gold_bayesian": {"type": "gold", "merge": "bayesian"},
    # The teacher's projection needs a loss of a type; bench/xtoken.py builds the one that is used.
    PKL_PARITY: {"type": "ctkd", "projection": {"weights": "decay"}},
    "alm": {"type": "alm"},
    "simct": {"type": "simct"},
    "policy_gradient": {"type": "policy_gradient"},
}
_ONE_TOKENIZER: dict[str, Mapping[str, Any]] = {
    "policy_gradient_baseline": {"type": "policy_gradient", "baseline": "top_k"},
    "policy_gradient_proximal": {"type": "policy_gradient", "skew": 0.3},
    "policy_gradient_both": {"type": "policy_gradient", "baseline": "top_k", "skew": 0.3},
}
#: ``prefix_kl`` without a part of it.
WITHOUT_BOUNDS = "prefix_kl_without_bounds"
LOSSES: tuple[str, ...] = (*_SETTINGS, SFT)
#: Forms of a loss that are compared with teachers of the student's tokenizer.
ONE_TOKENIZER_LOSSES: tuple[str, ...] = ("policy_gradient", *_ONE_TOKENIZER)


def loss_settings(name: str) -> LossConfig:
    """Return the settings of a loss by its name here: the defaults, except for those in it."""
    adapter: TypeAdapter[LossConfig] = TypeAdapter(LossConfig)
    known = _SETTINGS | _ONE_TOKENIZER | {"auto": {"type": "auto"}}
    known |= {WITHOUT_BOUNDS: {"type": "prefix_kl", "bounds": False}}
    return adapter.validate_python(known.get(name, _SETTINGS["ctkd"]))


@dataclass(frozen=True)
class Side:
    """A model of a pair."""

    family: Family
    tokenizer: Callable[[], PreTrainedTokenizerFast]
    task: Task
    steps: int
    """Steps of supervised training."""
    examples_per_step: int
    corruption: float = 0.0
    """Probability of replacing a part of a reference answer that is then continued."""
    misreading: float = 0.0
    """Probability of replacing a completion token by any number or digit."""
    learning_rate: float = 2e-3
    max_new_tokens: int = 24
    """A longer completion is wrong."""
    completion: Completion | None = None
    """A student's: trained until it completes that much, in at most ``steps``."""


@dataclass(frozen=True)
class Pair:
    """Teachers, a student, and a budget that is the same for every loss."""

    name: str
    title: str
    teachers: Mapping[str, Side]
    """Teachers by name; prompts are shared equally between them."""
    student: Side
    tasks: Mapping[str, Task]
    """Each teacher's task with reference answers in the student's tokens."""
    losses: tuple[str, ...]
    steps: int
    learning_rate: float
    top_k: int
    max_new_tokens: int
    ceiling: Mapping[str, Side] = field(default_factory=dict[str, Side])
    """Teachers with the student's own tokenizer, for ``topk_kl``, if ``teachers`` have others."""
    temperature: float | None = None
    """Sampling temperature of the student. Default: the trainer's for the loss."""
    teacher_temperature: float | None = None
    """Softmax temperature of the teachers' scores, if it is not 1."""
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    """Weights of the student's samples."""
    corrections: int | None = 0
    """Rounds of corrections of the student's samples; None: the default of ``mopd train``."""

    def teachers_of(self, loss: str) -> Mapping[str, Side]:
        """Return the teachers of a run with this loss."""
        return self.ceiling if loss == CEILING and self.ceiling else self.teachers


def _pair(teacher: Side, student: Side, **settings: Any) -> Pair:
    """Return a pair with one teacher."""
    return Pair(
        teachers={"teacher": teacher}, student=student, tasks={"teacher": student.task}, **settings
    )


def _sums(
    tokenizer: Callable[[ControlNames], PreTrainedTokenizerFast],
    names: ControlNames,
    *,
    teaches: bool,
) -> Side:
    whole = tokenizer is numeral_tokenizer
    return Side(
        family="qwen3",
        tokenizer=partial(tokenizer, names),
        task=Sums(whole_numbers=whole),
        steps=(2_000 if whole else 1_000) if teaches else 150,
        examples_per_step=64,
        misreading=0.15 if teaches else 0.0,
        learning_rate=4e-3,
    )


_ACROSS = tuple(name for name in LOSSES if name != "topk_kl")

_PAIRS = (
    _pair(
        name="digits_to_numerals",
        title="teacher writes digits, student whole numbers",
        teacher=_sums(digit_tokenizer, TEACHER_NAMES, teaches=True),
        student=_sums(numeral_tokenizer, STUDENT_NAMES, teaches=False),
        losses=_ACROSS,
        steps=1_200,
        learning_rate=4e-3,
        top_k=16,
        max_new_tokens=4,
    ),
    _pair(
        name="numerals_to_digits",
        title="teacher writes whole numbers, student digits",
        teacher=_sums(numeral_tokenizer, TEACHER_NAMES, teaches=True),
        student=_sums(digit_tokenizer, STUDENT_NAMES, teaches=False),
        losses=_ACROSS,
        steps=1_200,
        learning_rate=3e-3,
        top_k=16,
        max_new_tokens=4,
    ),
    _pair(
        name="words",
        title="teacher in SentencePiece-like pieces, student in byte-level ones, lists of words",
        teacher=Side("llama", words_teacher_tokenizer, WordLists(), 350, 128, corruption=0.15),
        student=Side("gpt_neox", student_tokenizer, WordLists(), 125, 64),
        losses=_ACROSS,
        steps=400,
        learning_rate=2e-3,
        top_k=16,
        max_new_tokens=12,
    ),
)

PAIRS: Mapping[str, Pair] = {pair.name: pair for pair in _PAIRS}


def shortened(pair: Pair, steps: int | None, model_steps: int | None) -> Pair:
    """The pair with fewer steps of distillation, and of the training before it."""
    if model_steps is not None:
        pair = replace(
            pair,
            teachers=_with_steps(pair.teachers, model_steps),
            ceiling=_with_steps(pair.ceiling, model_steps),
            student=replace(pair.student, steps=model_steps, completion=None),
        )
    return pair if steps is None else replace(pair, steps=steps)


def _with_steps(sides: Mapping[str, Side], steps: int) -> dict[str, Side]:
    return {name: replace(side, steps=steps) for name, side in sides.items()}
