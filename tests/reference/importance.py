"""Importance weights from their formula, one token and one byte at a time."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise


def importance_weights(
    student_ends: Sequence[int],
    student_logprobs: Sequence[float],
    teacher_ends: Sequence[int],
    teacher_logprobs: Sequence[float],
    *,
    least: float,
    discount: float,
) -> list[float]:
    """Return the weight of each student token.

    Args:
        student_ends: byte at which each of its tokens ends.
        teacher_ends: the same of another tokenization of the text.
    """
    shared = [0, *(end for end in student_ends if end in teacher_ends)]
    weights: list[float] = []
    for token in range(len(student_ends)):
        exponent = 0.0
        for begin, end in pairwise(shared):
            last = student_ends.index(end)
            if last >= token:
                break
            inside = [
                sum(nats for at, nats in zip(ends, logprobs, strict=True) if begin < at <= end)
                for ends, logprobs in (
                    (teacher_ends, teacher_logprobs),
                    (student_ends, student_logprobs),
                )
            ]
            exponent += discount ** (token - 1 - last) * (inside[0] - inside[1])
        weights.append(max(least, min(1.0, math.exp(min(exponent, 0.0)))))
    return weights


def text_mass(
    pieces: Sequence[bytes],
    rows: Sequence[Mapping[bytes, float]],
    tokens: int,
    power: float,
    least: float,
) -> float:
    """Return the probability of the text of the first tokens, in any token behind their beginnings.

    Args:
        pieces: the tokens.
        rows: probabilities of what follows the tokens before.
        power: of probabilities, before they are divided by their sum.
        least: other tokens with less do not count.
    """
    text, mass, before = b"".join(pieces[:tokens]), 0.0, 1.0
    for row in range(tokens):
        start = len(b"".join(pieces[:row]))
        total = sum(share**power for share in rows[row].values())
        mass += before * sum(
            share**power / total
            for token, share in rows[row].items()
            if token != pieces[row]
            and token.startswith(text[start:])
            and share**power / total >= least
        )
        before *= rows[row][pieces[row]] ** power / total
    return mass + before
