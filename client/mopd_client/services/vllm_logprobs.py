"""vLLM's ``prompt_logprobs`` as JSON -> ``TopKLogprobs``.

One object a prompt token, by token id: the token itself, and the k most likely, so k or k + 1
entries. The first token has ``null``: nothing predicts it. A logprob of minus infinity is written
as -9999 (by vLLM), as ``-Infinity`` or as ``null`` (by what may stand between).
"""

from collections.abc import Mapping, Sequence
from math import inf, isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.errors import DataError
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs

#: What vLLM writes in place of minus infinity, which JSON does not have.
_INSTEAD_OF_MINUS_INFINITY = -9999.0
#: Of a probability near one that was a float32.
_RESOLUTION = float(np.finfo(np.float32).epsneg)


def topk_of_prompt_logprobs(
    entries: Sequence[Mapping[str, Any] | None],
    token_ids: Sequence[int],
    *,
    first: int,
    k: int,
    known: NDArray[np.bool_],
) -> TopKLogprobs:
    """The rows that predict ``token_ids[first:]``.

    Ids that are no token of the tokenizer (rows of a padded head) are left out, and what the
    server gives them stands in the tail.

    Args:
        entries: one for each of ``token_ids``.
        first: position of the first completion token, at least 1.
        k: what was asked for.
        known: bool [ids], the tokenizer's tokens.

    Raises:
        DataError: when entries are missing, or hold no numbers.
    """
    if len(entries) != len(token_ids):
        raise DataError(f"{len(entries)} prompt_logprobs for {len(token_ids)} prompt tokens")
    rows = len(token_ids) - first
    ids = np.full((rows, k), ABSENT_ID, dtype=np.int32)
    logprobs = np.full((rows, k), -np.inf, dtype=np.float64)
    of_tokens = np.empty(rows, dtype=np.float64)
    for row, (token_id, entry) in enumerate(zip(token_ids[first:], entries[first:], strict=True)):
        found = _row(entry, first + row)
        if token_id not in found:
            raise DataError(f"prompt_logprobs {first + row} do not hold the prompt's own token")
        of_tokens[row] = found[token_id]
        best = _most_likely(found, token_id, k, known)
        ids[row, : len(best)] = [best_id for best_id, _ in best]
        logprobs[row, : len(best)] = [logprob for _, logprob in best]
    tails = tail_logprobs(logprobs, all_ids=int(known.sum()))
    return TopKLogprobs(
        ids, logprobs.astype(np.float32), of_tokens.astype(np.float32), tails.astype(np.float32)
    )


def tail_logprobs(logprobs: NDArray[np.float64], *, all_ids: int) -> NDArray[np.float64]:
    """[rows], nats: log of the mass outside the entries [rows, k], computed in float64.

    The entries are float32, so a tail below its resolution is not known; where ids are outside it
    is taken as that resolution, because none of them is impossible.

    Args:
        all_ids: how many ids there are.
    """
    outside = 1.0 - np.exp(logprobs).sum(axis=1)
    complete = (logprobs > -np.inf).sum(axis=1) >= all_ids
    with np.errstate(divide="ignore"):
        return np.log(np.where(complete, 0.0, np.clip(outside, _RESOLUTION, 1.0)))


def _row(entry: Mapping[str, Any] | None, position: int) -> dict[int, float]:
    """Id -> logprob of one prompt token."""
    if not isinstance(entry, Mapping):
        raise DataError(f"prompt_logprobs {position} are {entry!r}, expected an object")
    try:
        return {int(token): _number(told["logprob"]) for token, told in entry.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"prompt_logprobs {position} hold no logprobs: {error!r}") from error


def _number(value: Any) -> float:
    number = -inf if value is None else float(value)
    if isnan(number):
        raise ValueError("NaN")
    return -inf if number <= _INSTEAD_OF_MINUS_INFINITY else number


def _most_likely(
    found: Mapping[int, float], token_id: int, k: int, known: NDArray[np.bool_]
) -> list[tuple[int, float]]:
    """The k most likely of a row's entries; the prompt's own token is one more where it is not
    among them."""
    if len(found) > k + 1:
        raise DataError(f"{len(found)} prompt_logprobs for a token, expected {k} or {k + 1}")
    ranked = [pair for pair in found.items() if len(found) <= k or pair[0] != token_id]
    ranked.sort(key=lambda pair: -pair[1])
    return [
        (entry, logprob)
        for entry, logprob in ranked
        if logprob > -inf and 0 <= entry < len(known) and known[entry]
    ]
