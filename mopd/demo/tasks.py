"""The demo's two tasks: adding numbers and reversing lists of words.

A hash of the exercise decides if it is held out, so no training set can contain it.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from mopd_protocol import DataError, Message

TaskName = Literal["sums", "words"]
TASKS: tuple[TaskName, ...] = ("sums", "words")

#: A completion without an end of turn after this many tokens is wrong.
MAX_COMPLETION_TOKENS = 24
#: Addends: they and all sums have two digits.
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
    """A prompt and its only correct completion, in parts (digits, words)."""

    task: str
    prompt: str
    completion_parts: tuple[str, ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        """Prompt as a conversation of one turn."""
        return (Message(role="user", content=self.prompt),)

    @property
    def completion(self) -> str:
        """Correct completion, without the end-of-turn token."""
        return "".join(self.completion_parts)


def draw_training(task: TaskName, random: Random) -> Exercise:
    """Draw a random exercise that is not held out."""
    return _draw(task, random, lambda key: not _is_held_out(key))


def held_out_exercises(task: TaskName, count: int, seed: int) -> list[Exercise]:
    """Return ``count`` different held-out exercises.

    Raises:
        DataError: if there are fewer.
    """
    if task == "sums" and count > _held_out_sums():
        raise DataError(
            f"held-out sums: too few (found {_held_out_sums()}, expected at least {count}). "
            "Request fewer exercises."
        )
    random = Random(seed)
    exercises: dict[str, Exercise] = {}
    while len(exercises) < count:
        exercise = _draw(task, random, _is_held_out)
        exercises[exercise.prompt] = exercise
    return list(exercises.values())


def random_part(exercise: Exercise, random: Random, position: int) -> str:
    """Return a random digit or word for this position of a completion."""
    if exercise.task == "sums":
        return random.choice("0123456789")
    return _spaced(random.choice(WORDS), position)


def with_random_completion(exercise: Exercise, random: Random) -> Exercise:
    """Return the prompt with a random completion of the correct form.

    Sums become a random number with the same number of digits; lists are shuffled.
    """
    if exercise.task == "sums":
        digits = len(exercise.completion_parts)
        number = random.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        return Exercise("sums", exercise.prompt, tuple(str(number)))
    words = [part.strip() for part in exercise.completion_parts]
    random.shuffle(words)
    return Exercise("words", exercise.prompt, _word_parts(words))


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
    """Return one key for both orders: 13 + 14 in training would reveal 14 + 13."""
    return f"{min(first, second)} {max(first, second)}"


def _held_out_sums() -> int:
    return sum(_is_held_out(_sum_key(a, b)) for a in NUMBERS for b in NUMBERS)


def _draw_words(random: Random) -> tuple[str, Exercise]:
    words = random.sample(WORDS, WORDS_PER_LIST)
    key = " ".join(words)
    return key, Exercise("words", f"reverse: {key}", _word_parts(words[::-1]))


def _word_parts(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(_spaced(word, position) for position, word in enumerate(words))


def _spaced(word: str, position: int) -> str:
    return word if position == 0 else f" {word}"


def _is_held_out(key: str) -> bool:
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT_EVERY == 0
