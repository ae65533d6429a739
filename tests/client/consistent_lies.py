"""Changes of every response that agree with themselves: no check of one response can reject them.

Each is applied to second requests, too; ``of_some`` applies it to a part of the responses.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special

from tests.client.lying_proxy import ROWS, Document, Sequence, of_sequences

Change = Callable[[Document], object]


def _arrays(sequence: Sequence) -> Sequence:
    for name in ("token_ids", "token_logprobs", *ROWS):
        sequence[name] = np.array(sequence[name])
    return sequence


def consistent(sequence: Sequence) -> None:
    """Give every completion token a log-probability that its row permits."""
    for row, token in enumerate(sequence["token_ids"]):
        entry = np.flatnonzero(sequence["topk_ids"][row] == token)
        values = sequence["topk_logprobs"][row]
        limit = min(values[-1] if len(values) else 0, sequence["tail_logprobs"][row]) - 0.1
        sequence["token_logprobs"][row] = (
            values[entry[0]] if len(entry) else min(sequence["token_logprobs"][row], limit)
        )


def at_temperature(temperature: float) -> Change:
    """Scale the entries and the tail, and normalize them."""

    def change(sequence: Sequence) -> None:
        _arrays(sequence)
        tail = sequence["tail_logprobs"][:, None]
        values = np.hstack([sequence["topk_logprobs"], tail]) / temperature
        normalizer = scipy.special.logsumexp(values, axis=1)
        sequence["topk_logprobs"] = values[:, :-1] - normalizer[:, None]
        sequence["tail_logprobs"] = values[:, -1] - normalizer
        sequence["token_logprobs"] = sequence["token_logprobs"] / temperature - normalizer
        consistent(sequence)

    return of_sequences(change)


def sharpened(power: float) -> Change:
    """Scale all entries, and add the lost probability to the tail."""

    def change(sequence: Sequence) -> None:
        _arrays(sequence)
        for name in ("topk_logprobs", "token_logprobs"):
            sequence[name] = sequence[name] * power
        mass = np.exp(sequence["topk_logprobs"].astype(np.float64)).sum(axis=1)
        sequence["tail_logprobs"] = np.log(np.maximum(1 - mass, 1e-30))

    return of_sequences(change)


def _others(sequence: Sequence, row: int) -> np.ndarray:
    ids = sequence["topk_ids"][row]
    return np.flatnonzero((ids != sequence["token_ids"][row]) & (ids >= 0))


def _reversed(sequence: Sequence) -> None:
    _arrays(sequence)
    for row in range(len(sequence["token_ids"])):
        others = _others(sequence, row)
        sequence["topk_ids"][row, others] = sequence["topk_ids"][row, others[::-1]]


def _first_two_exchanged(sequence: Sequence) -> None:
    _arrays(sequence)
    for row in range(len(sequence["token_ids"])):
        others = _others(sequence, row)[:2]
        sequence["topk_ids"][row, others] = sequence["topk_ids"][row, others[::-1]]


def _random(sequence: Sequence) -> None:
    _arrays(sequence)
    generator = np.random.default_rng(sequence["token_ids"])
    for row, token in enumerate(sequence["token_ids"]):
        others = _others(sequence, row)
        ids = generator.permutation([i for i in range(5, 419) if i != token])
        sequence["topk_ids"][row, others] = ids[: len(others)]


def _repeated(sequence: Sequence, step: int) -> None:
    _arrays(sequence)
    for row in range(1, len(sequence["token_ids"]), step):
        for name in ROWS:
            sequence[name][row] = sequence[name][row - 1]
    consistent(sequence)


def partner(token: int, fixed: int) -> int:
    """Return the id that has this one's probability, except next to the token ``fixed``."""
    other = (token - 5) ^ 1
    return token if token < 5 or token >= 419 or fixed in (token, other + 5) else other + 5


def _relabelled(sequence: Sequence) -> None:
    _arrays(sequence)
    for row, token in enumerate(sequence["token_ids"].tolist()):
        ids = sequence["topk_ids"][row].tolist()
        sequence["topk_ids"][row] = [partner(i, token) if i >= 0 else i for i in ids]


def with_partners_as_candidates(body: bytes) -> bytes:
    """Change a request so that ``relabelled`` returns the requested candidates."""
    document = json.loads(body)
    for sequence in document["sequences"]:
        tokens = sequence.get("completion_token_ids", [])
        rows = sequence.get("candidate_ids", [])
        sequence.update(
            candidate_ids=[
                [partner(i, token) for i in row] for row, token in zip(rows, tokens, strict=False)
            ]
            if rows
            else None
        )
    return json.dumps(document).encode()


def at_one_temperature(body: bytes) -> bytes:
    """Change the temperature of every request to 1.3."""
    return json.dumps(json.loads(body) | {"temperature": 1.3}).encode()


def of_some(change: Change, period: int) -> Change:
    """Apply a change to every ``period``-th response."""
    count = 0

    def apply(document: Document) -> Any:
        nonlocal count
        count += 1
        return change(document) if count % period == 0 else None

    return apply


CHANGES: dict[str, Change] = {
    "temperature 1.3": at_temperature(1.3),
    "temperature 0.7": at_temperature(0.7),
    "power 1.3": sharpened(1.3),
    "ids reversed": of_sequences(_reversed),
    "first two ids exchanged": of_sequences(_first_two_exchanged),
    "random ids": of_sequences(_random),
    "every row repeated": of_sequences(lambda sequence: _repeated(sequence, 1)),
    "every fourth row repeated": of_sequences(lambda sequence: _repeated(sequence, 4)),
}
RELABELLED = of_sequences(_relabelled)
