"""Checks of responses of both routes against the model's own log-softmax."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from tests.reference.teacher_scores import next_token_logprobs
from tests.server.tiny_teachers import TinyTeacher, request_async

#: Log-probability of tokens without any probability, which JSON cannot express.
IMPOSSIBLE = -9999.0


def send(app: Any, path: str, body: Any, **headers: str) -> httpx.Response:
    """Send a POST request, outside an event loop."""
    return asyncio.run(request_async(app, "POST", path, body, headers))


def expected_rows(
    teacher: TinyTeacher, prompt: Sequence[int], temperature: float = 1.0
) -> list[dict[int, float]]:
    """Return the distributions that predict tokens 1… of a prompt, padding included."""
    padding = range(teacher.model.config.vocab_size)
    return [
        {
            **dict.fromkeys(padding, IMPOSSIBLE),
            **next_token_logprobs(teacher.model, prompt[:end], teacher.real_ids, temperature),
        }
        for end in range(1, len(prompt))
    ]


def require_rows(
    rows: Sequence[dict[str, dict[str, float]] | None],
    prompt: Sequence[int],
    expected: Sequence[dict[int, float]],
    top_k: int,
) -> None:
    """Check ``prompt_logprobs`` of one prompt: ids, log-probabilities and ranks."""
    assert rows[0] is None
    assert len(rows) == len(prompt)
    for token, row, distribution in zip(prompt[1:], rows[1:], expected, strict=True):
        assert row is not None
        ranked = sorted(row, key=lambda each: row[each]["rank"])
        assert [row[each]["rank"] for each in ranked][:top_k] == [*range(1, top_k + 1)]
        assert str(token) in row
        assert len(row) == top_k + (ranked.index(str(token)) >= top_k)
        best = sorted(distribution.values(), reverse=True)[:top_k]
        np.testing.assert_allclose(
            [row[each]["logprob"] for each in ranked[:top_k]], best, atol=1e-5
        )
        for each, entry in row.items():
            assert math.isclose(entry["logprob"], distribution[int(each)], abs_tol=1e-5)
        likelier = sum(value > distribution[token] + 1e-6 for value in distribution.values())
        rank, equal = row[str(token)]["rank"], list(distribution.values())
        ties = sum(abs(value - distribution[token]) <= 1e-6 for value in equal)
        assert likelier < rank <= likelier + ties
