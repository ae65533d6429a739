"""vLLM's prompt log-probabilities read one position and one entry at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Flat:
    """The same four lists as vLLM's ``FlatLogprobs``."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def append(self, entries: Sequence[tuple[int, float]]) -> None:
        """The entries of the next position."""
        self.start_indices.append(len(self.token_ids))
        for token_id, logprob in entries:
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
        self.end_indices.append(len(self.token_ids))


def flat_of(
    distributions: Sequence[Sequence[float]], tokens: Sequence[int], top_k: int, *, once: bool
) -> Flat:
    """Make vLLM's logprobs of ``tokens``; token ``i`` was predicted by distribution ``i``.

    ``distributions[0]`` is not read: nothing predicts the first token. With ``once``, a token that
    is among the ``top_k`` is not repeated, as in vLLM's dictionaries.
    """
    flat = Flat()
    for position, token in enumerate(tokens):
        if position == 0:
            flat.append([])
            continue
        logprobs = distributions[position]
        ranked = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])[:top_k]
        entries = [(token, logprobs[token]), *((i, logprobs[i]) for i in ranked)]
        flat.append(list(dict(entries).items()) if once else entries)
    return flat


@dataclass
class Row:
    """The distribution that predicts one completion token."""

    entries: dict[int, float]  # id -> nats, possible ids only
    token_logprob: float
    tail: float  # mass outside the entries, not its logarithm


def rows_by_hand(
    distributions: Sequence[Sequence[float]], tokens: Sequence[int], rows: int, top_k: int
) -> list[Row]:
    """The last ``rows`` rows, from the distributions themselves."""
    entries: list[Row] = []
    for position in range(len(tokens) - rows, len(tokens)):
        logprobs = distributions[position]
        ranked = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])
        kept = {i: logprobs[i] for i in ranked[:top_k] if logprobs[i] > -math.inf}
        left = sum(math.exp(logprobs[i]) for i in ranked[top_k:])
        entries.append(Row(kept, logprobs[tokens[position]], left))
    return entries
