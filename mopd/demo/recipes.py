"""Training recipes of the demo's models; tuned to two minutes on two CPU cores."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from transformers import PreTrainedTokenizerFast

from mopd.demo import demo_tokenizers, models, tasks
from mopd.demo.models import Family

#: ``format`` trains prompts of both tasks with random completions: the form without the content.
Curriculum = Literal["sums", "words", "format"]

#: Incremented when code changes a result without changing a setting below.
_VERSION = 1


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights of one model, up to rounding."""

    name: str
    family: Family
    curriculum: Curriculum
    steps: int
    examples_per_step: int
    learning_rate: float
    corruption: float  # probability that the input of a completion part is random
    seed: int = 0

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer of this model."""
        return _TOKENIZERS[self.family]()

    def cache_key(self) -> str:
        """Return 32 hex digits over settings, sizes, tokenizer and tasks."""
        determining = {
            "version": _VERSION,
            "recipe": asdict(self),
            "sizes": [models.HIDDEN_SIZE, models.LAYERS, models.HEADS],
            "tokenizer": self.tokenizer().backend_tokenizer.to_str(),
            "tasks": [list(tasks.NUMBERS), tasks.WORDS_PER_LIST, tasks.WORDS],
        }
        canonical = json.dumps(determining, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]


_TOKENIZERS: dict[Family, Callable[[], PreTrainedTokenizerFast]] = {
    "qwen3": demo_tokenizers.sums_teacher_tokenizer,
    "llama": demo_tokenizers.words_teacher_tokenizer,
    "gpt_neox": demo_tokenizers.student_tokenizer,
}

SUMS_TEACHER = Recipe(
    name="sums-teacher",
    family="qwen3",
    curriculum="sums",
    steps=350,
    examples_per_step=128,
    learning_rate=2e-3,
    corruption=0.15,
)
WORDS_TEACHER = Recipe(
    name="words-teacher",
    family="llama",
    curriculum="words",
    steps=350,
    examples_per_step=128,
    learning_rate=2e-3,
    corruption=0.15,
)
STUDENT = Recipe(
    name="student",
    family="gpt_neox",
    curriculum="format",
    steps=250,
    examples_per_step=64,
    learning_rate=2e-3,
    corruption=0.0,
)
RECIPES = (SUMS_TEACHER, WORDS_TEACHER, STUDENT)
