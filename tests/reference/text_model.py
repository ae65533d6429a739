"""A model over bytes, and the token models that it *is* when seen through a tokenizer.

The byte model is a Markov chain with an end, cut at a longest length, so that all its texts can be
listed. A token model's row after some tokens is the exact distribution of the next one over all
texts whose canonical tokenization begins with those tokens. Plain Python, float64, by enumeration.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import cached_property

#: The token after the last one of a text.
END = ""

Tokenize = Callable[[str], Sequence[str]]


def markov_texts(letters: str, longest: int, seed: int, end: float = 0.2) -> dict[str, float]:
    """Text -> probability, of every text of at most ``longest`` letters."""
    chance = random.Random(seed)
    rows = {
        context: [chance.gammavariate(0.7, 1.0) + 0.02 for _ in letters]
        for context in ["", *letters]
    }
    probabilities: dict[str, float] = {}

    def grow(text: str, mass: float) -> None:
        stop = 1.0 if len(text) == longest else end
        probabilities[text] = mass * stop
        if len(text) < longest:
            weights = rows[text[-1:]]
            for letter, weight in zip(letters, weights, strict=True):
                grow(text + letter, mass * (1 - stop) * weight / math.fsum(weights))

    grow("", 1.0)
    return probabilities


class TokenModel:
    """The byte model through one tokenizer."""

    def __init__(self, texts: dict[str, float], tokenize: Tokenize) -> None:
        self.texts = texts
        self.written = {text: (*tokenize(text), END) for text in texts}

    @cached_property
    def _masses(self) -> dict[tuple[str, ...], float]:
        """Mass of all texts that are written with these tokens first."""
        parts: dict[tuple[str, ...], list[float]] = {}
        for text, tokens in self.written.items():
            for stop in range(len(tokens) + 1):
                parts.setdefault(tokens[:stop], []).append(self.texts[text])
        return {tokens: math.fsum(masses) for tokens, masses in parts.items()}

    @cached_property
    def _following(self) -> dict[tuple[str, ...], set[str]]:
        continuations: dict[tuple[str, ...], set[str]] = {}
        for tokens in self.written.values():
            for at, token in enumerate(tokens):
                continuations.setdefault(tokens[:at], set()).add(token)
        return continuations

    def row(self, tokens: Sequence[str]) -> dict[str, float]:
        """Next token -> probability, after these."""
        before = tuple(tokens)
        return {
            token: self._masses[(*before, token)] / self._masses[before]
            for token in sorted(self._following[before])
        }

    def boundaries(self, text: str) -> set[int]:
        """Offsets at which a token starts in a text, the end of text included."""
        at, starts = 0, {0}
        for token in self.written[text][:-1]:
            at += len(token)
            starts.add(at)
        return starts
