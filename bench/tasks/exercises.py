"""Tasks: dates in four forms, subtraction, rows of CSV, German numbers, code, times of day.

The text is the same for every tokenizer, so one class serves teachers and students. A hash of the
prompt decides if an exercise is held out.
"""

import hashlib
import json
import re
from abc import abstractmethod
from calendar import month_name
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random

from mopd.demo.examples import Encoder
from mopd.demo.tasks import Exercise

_HELD_OUT = 200

_FIRST_DAY, _DAYS = date(1900, 1, 1), 150 * 365
#: Values of a column; numbers for the last one.
_COLUMNS: Mapping[str, Sequence[str | int]] = {
    "item": ("apple", "banana", "cherry", "lemon", "mango", "olive", "pear", "plum"),
    "city": ("Berlin", "Dublin", "Lisbon", "London", "Madrid", "Oslo", "Paris", "Vienna"),
    "colour": ("black", "blue", "brown", "green", "grey", "orange", "red", "white"),
    "unit": ("bag", "box", "crate", "jar", "kilo", "litre", "pack", "tray"),
    "count": range(1, 50),
}
_COLUMNS_PER_ROW = 4
# fmt: off
_GERMAN_TO_TWENTY = (
    "null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn",
    "elf", "zwölf", "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn",
    "neunzehn",
)
_GERMAN_TENS = (
    "", "", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig",
)
_GERMAN_THINGS = (
    "Äpfel", "Birnen", "Nüsse", "Kürbisse", "Möhren", "Brötchen", "Blumen", "Bäume", "Schlösser",
    "Füchse",
)
_VARIABLES = ("i", "n", "row", "item", "count", "total", "name", "index", "value", "key")
# fmt: on
_FUNCTIONS = ("print", "append", "visit", "update", "emit", "remove")
_COMPARISONS = ("<", ">", "==", "!=", "<=", ">=")
_PLACES = ("Århus", "Coruña", "Gdańsk", "Genève", "Łódź", "Malmö", "Tromsø", "Zürich")
# fmt: off
_ENGLISH_TO_TWENTY = (
    "twelve", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "a quarter", "sixteen", "seventeen", "eighteen",
    "nineteen",
)
# fmt: on
_CHINESE_DIGITS = "〇一二三四五六七八九"
# fmt: off
_HINDI_DAYS = (
    "एक", "दो", "तीन", "चार", "पाँच", "छह", "सात", "आठ", "नौ", "दस", "ग्यारह", "बारह",
    "तेरह", "चौदह", "पंद्रह", "सोलह", "सत्रह", "अठारह", "उन्नीस", "बीस", "इक्कीस", "बाईस",
    "तेईस", "चौबीस", "पच्चीस", "छब्बीस", "सत्ताईस", "अट्ठाईस", "उनतीस", "तीस", "इकतीस",
)
_HINDI_MONTHS = (
    "जनवरी", "फरवरी", "मार्च", "अप्रैल", "मई", "जून", "जुलाई", "अगस्त", "सितंबर", "अक्टूबर", "नवंबर",
    "दिसंबर",
)
# fmt: on
_HINDI_DIGITS = str.maketrans("0123456789", "०१२३४५६७८९")
#: One exercise in this many is held out.
_HELD_OUT_EVERY = 5


class TextTask:
    """A task with one reference answer per prompt, as text."""

    training_prompts = 3_000

    @abstractmethod
    def draw(self, random: Random) -> Exercise:
        """Draw an exercise."""

    def training(self, seed: int) -> list[Exercise]:
        """See ``Task``."""
        return self._draw(self.training_prompts, seed, held_out=False)

    def held_out(self) -> list[Exercise]:
        """See ``Task``."""
        return self._draw(_HELD_OUT, 0, held_out=True)

    def warm_start(self, exercise: Exercise, random: Random) -> Exercise:
        """See ``Task``: the reference answer; only a few steps are made."""
        del random
        return exercise

    def random_part(self, exercise: Exercise, random: Random, position: int) -> str:
        """See ``Task``: the part of another reference answer."""
        del exercise
        return self.draw(random).completion_parts[position]

    def wrong_ids(self, encoder: Encoder) -> list[int]:
        """See ``Task``: all tokens of reference answers."""
        exercises = self.held_out()
        return sorted({i for each in exercises for i in encoder.part(each.completion)})

    def _draw(self, count: int, seed: int, *, held_out: bool) -> list[Exercise]:
        random = Random(f"{type(self).__name__} {seed}")
        exercises: list[Exercise] = []
        while len(exercises) < count:
            exercise = self.draw(random)
            if _is_held_out(exercise.prompt) == held_out:
                exercises.append(exercise)
        return exercises


@dataclass(frozen=True)
class Dates(TextTask):
    """``17.01.2024``: ``January 17, 2024``."""

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        day = _FIRST_DAY + timedelta(random.randrange(_DAYS))
        parts = month_name[day.month], f" {day.day}", ",", f" {day.year}"
        return Exercise("dates", f"{day:%d.%m.%Y}", parts)


@dataclass(frozen=True)
class IsoDates(TextTask):
    """``January 17, 2024``: ``2024-01-17``."""

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        day = _FIRST_DAY + timedelta(random.randrange(_DAYS))
        parts = f"{day:%Y}", "-", f"{day:%m}", "-", f"{day:%d}"
        return Exercise("iso_dates", f"{month_name[day.month]} {day.day}, {day.year}", parts)


@dataclass(frozen=True)
class ChineseDates(TextTask):
    """``2024-01-17``: ``二〇二四年一月十七日``."""

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        day = _FIRST_DAY + timedelta(random.randrange(_DAYS))
        year = "".join(_CHINESE_DIGITS[int(digit)] for digit in str(day.year))
        parts = year, "年", _chinese_number(day.month), "月", _chinese_number(day.day), "日"
        return Exercise("chinese_dates", f"{day:%Y-%m-%d}", parts)


@dataclass(frozen=True)
class HindiDates(TextTask):
    """``17.01.2024``: ``सत्रह जनवरी २०२४``."""

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        day = _FIRST_DAY + timedelta(random.randrange(_DAYS))
        year = str(day.year).translate(_HINDI_DIGITS)
        parts = _HINDI_DAYS[day.day - 1], f" {_HINDI_MONTHS[day.month - 1]}", f" {year}"
        return Exercise("hindi_dates", f"{day:%d.%m.%Y}", parts)


@dataclass(frozen=True)
class Subtraction(TextTask):
    """``47 - 12 =``: ``35``; results are not negative.

    Small models that have not been trained on a subtraction are not sure of it. A sharp teacher
    has been trained on all of them (``complete``).
    """

    largest: int = 49
    complete: bool = False

    def training(self, seed: int) -> list[Exercise]:
        """See ``Task``."""
        known = super().training(seed)
        return known + self.held_out() * 3 if self.complete else known

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        difference, subtrahend = sorted(random.sample(range(self.largest + 2), 2))
        subtrahend -= difference + 1
        minuend = difference + subtrahend
        return Exercise("subtraction", f"{minuend} - {subtrahend} =", (str(difference),))


@dataclass(frozen=True)
class Rows(TextTask):
    """A header and a row of CSV: the row as a JSON object, its keys in the same order."""

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        row = {
            name: random.choice(_COLUMNS[name])
            for name in random.sample(sorted(_COLUMNS), _COLUMNS_PER_ROW)
        }
        prompt = "\n".join([",".join(row), ",".join(str(value) for value in row.values())])
        parts = [part for part in re.split(r"( ?\w+)", json.dumps(row)) if part]
        return Exercise("rows", prompt, tuple(parts))


@dataclass(frozen=True)
class GermanNumbers(TextTask):
    """``12 Äpfel, 47 Nüsse``: ``zwölf Äpfel und siebenundvierzig Nüsse``."""

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        things = random.sample(_GERMAN_THINGS, 2)
        numbers = [random.randrange(2, 100) for _ in things]
        pairs = list(zip(numbers, things, strict=True))
        prompt = ", ".join(f"{number} {thing}" for number, thing in pairs)
        text = " und ".join(f"{_german_number(number)} {thing}" for number, thing in pairs)
        return Exercise("german_numbers", prompt, tuple(re.findall(r" ?\w+", text)))


@dataclass(frozen=True)
class CodeBlocks(TextTask):
    """``for i in range(9): if i > 3: print(n)``: the same as an indented block."""

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        counter, argument = random.sample(_VARIABLES, 2)
        first, second = random.randrange(100), random.randrange(100)
        lines = (
            f"for {counter} in range({first}):",
            f"if {counter} {random.choice(_COMPARISONS)} {second}:",
            f"{random.choice(_FUNCTIONS)}({argument})",
        )
        block = "\n".join("    " * depth + line for depth, line in enumerate(lines))
        # A token may contain a complete word, so a part contains no less.
        parts = re.findall(r" *[^ \n]+\n?", block)
        return Exercise("code_blocks", " ".join(lines), tuple(parts))


@dataclass(frozen=True)
class Times(TextTask):
    """``14:45 Łódź``: ``a quarter to three in the afternoon, Łódź``."""

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        hour, minute = random.randrange(24), random.randrange(1, 60)
        place = random.choice(_PLACES)
        is_past = minute <= 30
        minutes = _english_minutes(minute if is_past else 60 - minute)
        parts = (
            f"{minutes} {'past' if is_past else 'to'}",
            f" {_ENGLISH_TO_TWENTY[(hour + (not is_past)) % 12]}",
            f" in the {'morning' if hour < 12 else 'afternoon' if hour < 18 else 'evening'}",
            ",",
            f" {place}",
        )
        return Exercise("times", f"{hour:02d}:{minute:02d} {place}", parts)


@dataclass(frozen=True)
class Mixture(TextTask):
    """Several tasks in equal parts, for a student's warm start."""

    parts: tuple[TextTask, ...]
    training_prompts = 12_000

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        return random.choice(self.parts).draw(random)


def _chinese_number(number: int) -> str:
    """Return a number from 1 to 99 as it is read."""
    tens, ones = divmod(number, 10)
    begun = "" if tens < 2 else _CHINESE_DIGITS[tens]
    return begun + ("十" if tens else "") + (_CHINESE_DIGITS[ones] if ones else "")


def _english_minutes(number: int) -> str:
    """Return a number of minutes from 1 to 30 in words."""
    if number == 30:
        return "half"
    if number < len(_ENGLISH_TO_TWENTY):
        return _ENGLISH_TO_TWENTY[number]
    ones = number % 10
    return f"twenty-{_ENGLISH_TO_TWENTY[ones]}" if ones else "twenty"


def _german_number(number: int) -> str:
    """Return a number from 2 to 99 in words."""
    if number < len(_GERMAN_TO_TWENTY):
        return _GERMAN_TO_TWENTY[number]
    tens, ones = divmod(number, 10)
    begun = "ein" if ones == 1 else _GERMAN_TO_TWENTY[ones]
    return (f"{begun}und" if ones else "") + _GERMAN_TENS[tens]


def _is_held_out(prompt: str) -> bool:
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT_EVERY == 0
