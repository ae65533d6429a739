"""Random texts with one beginning: words, joined words, numbers, code and runs of spaces."""

import random
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

#: Letters that the words of one set share, and the least letters of a word.
_STEM, _SHORTEST = 3, 5
_ENDINGS = ("", "s", "er", " de", ".")
_LINES = (
    "return self.x",
    "raise KeyError",
    "def __init__",
    "for i in y:",
    "if not x:",
    "class A(B):",
    "import os",
    "self._x = 1",
    "yield None",
    "\n    pass",
)


def words_of(tokenizers: Iterable[Tokenizer]) -> list[str]:
    """Return the tokens that are words, with a space before them or without, in order."""
    words: set[str] = set()
    for tokenizer in tokenizers:
        ids = range(tokenizer.get_vocab_size(with_added_tokens=False))
        words.update(tokenizer.decode_batch([[token] for token in ids]))
    return sorted(w for w in words if len(w.strip()) >= _SHORTEST and w.strip().isalpha())


class RandomTexts:
    """Draws sets of two to five different texts.

    Args:
        words: at least four with the same first three letters.
    """

    def __init__(self, words: Sequence[str], seed: int) -> None:
        self._words = words
        self._draw = random.Random(seed)
        by_stem: dict[str, list[str]] = {}
        for word in words:
            by_stem.setdefault(word.strip()[:_STEM], []).append(word)
        self._stems = [each for each in by_stem.values() if len(each) > _STEM]

    def next(self) -> tuple[str, ...]:
        """Draw one set."""
        inflected = (self._inflected, self._inflected)
        kinds = (*inflected, self._joined, self._numbers, self._code, self._spaces)
        texts: list[str] = []
        while len(texts) < 2:
            texts = sorted(set(self._draw.choice(kinds)()))
        return tuple(texts)

    def _inflected(self) -> list[str]:
        words = self._draw.sample(self._draw.choice(self._stems), self._draw.randint(3, 4))
        return [word + self._draw.choice(_ENDINGS) for word in words]

    def _joined(self) -> list[str]:
        first = self._draw.choice(self._words)
        return [first + "".join(self._draw.choices(self._words, k=2)) for _ in range(4)]

    def _numbers(self) -> list[str]:
        digits = [self._draw.randint(1, 6) for _ in range(5)]
        return [f"n = {self._draw.randrange(10**count)};" for count in digits]

    def _code(self) -> list[str]:
        lines = self._draw.sample(_LINES, 4)
        return ["    " * self._draw.randint(1, 2) + line for line in lines]

    def _spaces(self) -> list[str]:
        return ["a" + " " * self._draw.randint(1, 6) + self._draw.choice("xy#(12") for _ in "1234"]
