"""The demo's two tasks: adding numbers and reversing lists of words, each with exact answers.

Whether an exercise is held out is decided by a hash of the exercise, not by a list: whatever
draws from the training side, now or later, can never meet a held-out one.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Message

TaskName = Literal["sums", "words"]
TASKS: tuple[TaskName, ...] = ("sums", "words")

#: What is added: two digits each, and two digits in every sum, so that places stay in place.
NUMBERS = range(10, 50)
WORDS_PER_LIST = 4
# fmt: off
WORDS: tuple[str, ...] = (
    "ant", "bee", "cat", "dog", "elk", "fox", "goat", "hen", "ibex", "jay", "koala", "lion",
    "mole", "newt", "owl", "pig", "quail", "rabbit", "seal", "tiger", "apple", "banana",
    "cherry", "date", "elder", "fig", "grape", "lemon", "mango", "olive", "pear", "plum",
    "quince", "raspberry", "strawberry", "tomato", "walnut", "bridge", "candle", "engine",
    "feather", "garden", "hammer", "island", "lantern", "mountain", "pencil", "umbrella",
)
# fmt: on

#: One exercise in this many is held out.
_HELD_OUT_EVERY = 5


@dataclass(frozen=True)
class Exercise:
    """A prompt, and its only right answer in parts (digits, words), each written after the last."""

    task: TaskName
    question: str
    answer_parts: tuple[str, ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as a conversation of one turn."""
        return (Message(role="user", content=self.question),)

    @property
    def answer(self) -> str:
        """The right answer, without the token that ends the turn."""
        return "".join(self.answer_parts)


def draw_training(task: TaskName, random: Random) -> Exercise:
    """A random exercise of the training side."""
    return _draw(task, random, lambda key: not _is_held_out(key))


def held_out_exercises(task: TaskName, count: int, seed: int) -> list[Exercise]:
    """``count`` different exercises that no training ever sees.

    Raises:
        DataError: when there are not that many; sums are few.
    """
    if task == "sums" and count > _held_out_sums():
        raise DataError(f"asked for {count} held-out sums, but there are {_held_out_sums()}")
    random = Random(seed)
    found: dict[str, Exercise] = {}
    while len(found) < count:
        exercise = _draw(task, random, _is_held_out)
        found[exercise.question] = exercise
    return list(found.values())


def random_part(exercise: Exercise, random: Random, position: int) -> str:
    """Any digit or word of the right form for this position of the answer."""
    if exercise.task == "sums":
        return random.choice("0123456789")
    return _spaced(random.choice(WORDS), position)


def with_random_answer(exercise: Exercise, random: Random) -> Exercise:
    """The same prompt with an answer of the right form that does not depend on the right one.

    Sums become any number of as many digits; lists become their own words in any order.
    """
    if exercise.task == "sums":
        digits = len(exercise.answer_parts)
        number = random.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        return Exercise("sums", exercise.question, tuple(str(number)))
    words = [part.strip() for part in exercise.answer_parts]
    random.shuffle(words)
    return Exercise("words", exercise.question, _word_parts(words))


def _draw(task: TaskName, random: Random, accept: Callable[[str], bool]) -> Exercise:
    draw = _draw_sum if task == "sums" else _draw_words
    while True:
        key, exercise = draw(random)
        if accept(key):
            return exercise


def _draw_sum(random: Random) -> tuple[str, Exercise]:
    first, second = random.choice(NUMBERS), random.choice(NUMBERS)
    key = _sum_key(first, second)
    return key, Exercise("sums", f"{first} + {second} =", tuple(str(first + second)))


def _sum_key(first: int, second: int) -> str:
    """One key for both orders: 13 + 14 in training would give away 14 + 13."""
    return f"{min(first, second)} {max(first, second)}"


def _held_out_sums() -> int:
    return sum(_is_held_out(_sum_key(a, b)) for a in NUMBERS for b in NUMBERS)


def _draw_words(random: Random) -> tuple[str, Exercise]:
    words = random.sample(WORDS, WORDS_PER_LIST)
    listed = " ".join(words)
    return listed, Exercise("words", f"reverse: {listed}", _word_parts(words[::-1]))


def _word_parts(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(_spaced(word, position) for position, word in enumerate(words))


def _spaced(word: str, position: int) -> str:
    return word if position == 0 else f" {word}"


def _is_held_out(key: str) -> bool:
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT_EVERY == 0
