"""What to train for the demo, and with which settings; a cache key names the outcome.

The numbers were tuned on two CPU cores: both teachers together in two minutes, the student's
warm start in seconds.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from transformers import PreTrainedTokenizerFast

from mopd.demo import demo_tokenizers, models, tasks
from mopd.demo.models import Family

#: ``format`` shows prompts of both tasks with random answers: the form without the content.
Curriculum = Literal["sums", "words", "format"]

#: Raised when code that shapes a result changes in a way that no setting below tells.
_VERSION = 1


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights of one model of the demo, up to rounding."""

    name: str
    family: Family
    curriculum: Curriculum
    steps: int
    examples_per_step: int
    learning_rate: float
    corruption: float  # probability with which a part of an answer is shown wrong
    seed: int = 0

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of this model."""
        return _TOKENIZERS[self.family]()

    def cache_key(self) -> str:
        """32 hex digits over the settings, the sizes, the tokenizer and the tasks."""
        decisive = {
            "version": _VERSION,
            "recipe": asdict(self),
            "sizes": [models.HIDDEN_SIZE, models.LAYERS, models.HEADS],
            "tokenizer": self.tokenizer().backend_tokenizer.to_str(),
            "tasks": [list(tasks.NUMBERS), tasks.WORDS_PER_LIST, tasks.WORDS],
        }
        canonical = json.dumps(decisive, sort_keys=True)
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
