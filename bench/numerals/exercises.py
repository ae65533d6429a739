"""Sums below a hundred: the training set, the held-out set, and corrupted variants."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from bench.numerals.numeral_tokenizers import LARGEST_NUMERAL
from mopd.demo.examples import Encoder
from mopd.demo.tasks import (
    Exercise,
    draw_training,
    held_out_exercises,
    random_part,
    with_random_completion,
)

#: What is added.
ADDENDS = range(50)
#: One pair of addends in this many is held out, in both orders.
_HELD_OUT_EVERY = 5
#: Prompts and held-out exercises of the words task, which has too many to list.
_WORD_LISTS, _HELD_OUT_WORD_LISTS = 2_000, 250


class Task(Protocol):
    """Exercises with one reference answer each, for one tokenizer."""

    def training(self, seed: int) -> Sequence[Exercise]:
        """Return the training exercises."""
        ...

    def held_out(self) -> Sequence[Exercise]:
        """Return the held-out exercises, the same for all runs."""
        ...

    def warm_start(self, exercise: Exercise, random: Random) -> Exercise:
        """Return what a student is trained on before distillation, with the same prompt."""
        ...

    def wrong_ids(self, encoder: Encoder) -> list[int]:
        """Return tokens that a student might sample in place of a correct one."""
        ...

    def random_part(self, exercise: Exercise, random: Random, position: int) -> str:
        """Return what a student might sample in place of a part of the reference answer."""
        ...


@dataclass(frozen=True)
class Sums:
    """``a+b=`` for ``ADDENDS``; a reference answer is split as the tokenizer splits it."""

    whole_numbers: bool

    def training(self, seed: int) -> list[Exercise]:
        """See ``Task``."""
        del seed  # the list is complete
        return [self._exercise(a, b) for a, b in _pairs() if not _is_held_out(a, b)]

    def held_out(self) -> list[Exercise]:
        """See ``Task``."""
        return [self._exercise(a, b) for a, b in _pairs() if _is_held_out(a, b)]

    def warm_start(self, exercise: Exercise, random: Random) -> Exercise:
        """See ``Task``: the result of a random sum."""
        other = random.choice(ADDENDS) + random.choice(ADDENDS)
        return Exercise("sums", exercise.prompt, self._parts(other))

    def wrong_ids(self, encoder: Encoder) -> list[int]:
        """See ``Task``: all numbers, or all digits."""
        numbers = range(LARGEST_NUMERAL + 1) if self.whole_numbers else range(10)
        return [token_id for number in numbers for token_id in encoder.part(str(number))]

    def random_part(self, exercise: Exercise, random: Random, position: int) -> str:
        """See ``Task``."""
        return random_part(exercise, random, position)

    def _exercise(self, a: int, b: int) -> Exercise:
        return Exercise("sums", f"{a}+{b}=", self._parts(a + b))

    def _parts(self, number: int) -> tuple[str, ...]:
        return (str(number),) if self.whole_numbers else tuple(str(number))


@dataclass(frozen=True)
class WordLists:
    """The demo's lists of words, to be reversed."""

    def training(self, seed: int) -> list[Exercise]:
        """See ``Task``."""
        random = Random(seed)
        return [draw_training("words", random) for _ in range(_WORD_LISTS)]

    def held_out(self) -> list[Exercise]:
        """See ``Task``."""
        return held_out_exercises("words", _HELD_OUT_WORD_LISTS, seed=0)

    def warm_start(self, exercise: Exercise, random: Random) -> Exercise:
        """See ``Task``: the same words in any order."""
        return with_random_completion(exercise, random)

    def wrong_ids(self, encoder: Encoder) -> list[int]:
        """See ``Task``: complete words are replaced (``Side.corruption``)."""
        del encoder
        return []

    def random_part(self, exercise: Exercise, random: Random, position: int) -> str:
        """See ``Task``."""
        return random_part(exercise, random, position)


def _pairs() -> list[tuple[int, int]]:
    return [(a, b) for a in ADDENDS for b in ADDENDS]


def _is_held_out(a: int, b: int) -> bool:
    """Return whether the hash of the unordered pair is held out: 13+14 would reveal 14+13."""
    digest = hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT_EVERY == 0
