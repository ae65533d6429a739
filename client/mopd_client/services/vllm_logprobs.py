"""vLLM's ``prompt_logprobs`` as JSON -> ``TopKLogprobs``.

One object per prompt token, keyed by token id: the prompt's token and the k most likely, k or k + 1
entries in all. The first token has ``null``, as no token precedes it. Minus infinity is spelled
-9999 (by vLLM), ``-Infinity`` or ``null`` (by proxies).
"""

from collections.abc import Mapping, Sequence
from math import inf, isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.errors import DataError
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs

#: vLLM's substitute for minus infinity, which JSON lacks.
_MINUS_INFINITY = -9999.0
#: Spacing of float32 values below one.
_RESOLUTION = float(np.finfo(np.float32).epsneg)


def topk_of_prompt_logprobs(
    entries: Sequence[Mapping[str, Any] | None],
    token_ids: Sequence[int],
    *,
    first: int,
    k: int,
    known: NDArray[np.bool_] | None,
) -> TopKLogprobs:
    """Return the rows that predict ``token_ids[first:]``.

    Ids without a token (rows of a padded head) are skipped; their mass is part of the tail. A
    service that translates may know nothing of a position, or nothing of its token.

    Args:
        entries: one per token of ``token_ids``.
        first: position of the first completion token, at least 1.
        k: requested number of entries.
        known: bool [ids], True for ids with a token; None for a service of mopd, all of whose ids
            have one, and which may translate.

    Raises:
        DataError: on missing entries or invalid numbers.
    """
    if len(entries) != len(token_ids):
        raise DataError(
            f"wrong number of prompt_logprobs (found {len(entries)}, expected {len(token_ids)})"
        )
    rows = len(token_ids) - first
    ids = np.full((rows, k), ABSENT_ID, dtype=np.int32)
    logprobs = np.full((rows, k), -np.inf, dtype=np.float64)
    token_logprobs = np.empty(rows, dtype=np.float64)
    for row, (token_id, entry) in enumerate(zip(token_ids[first:], entries[first:], strict=True)):
        candidates = {} if entry is None and known is None else _row(entry, first + row)
        if token_id not in candidates and known is not None:
            raise DataError(f"prompt_logprobs[{first + row}]: the prompt's token is missing")
        token_logprobs[row] = candidates.get(token_id, -np.inf)
        best = _most_likely(candidates, token_id, k, known)
        ids[row, : len(best)] = [best_id for best_id, _ in best]
        logprobs[row, : len(best)] = [logprob for _, logprob in best]
    tails = tail_logprobs(logprobs, all_ids=None if known is None else int(known.sum()))
    return TopKLogprobs(
        ids,
        logprobs.astype(np.float32),
        token_logprobs.astype(np.float32),
        tails.astype(np.float32),
    )


def tail_logprobs(logprobs: NDArray[np.float64], *, all_ids: int | None) -> NDArray[np.float64]:
    """Return the log of the mass outside the entries [rows, k] in nats, [rows], in float64.

    The entries are float32, which does not resolve a smaller tail: a tail with ids is at least the
    resolution, because no id is impossible.

    Args:
        all_ids: number of ids; None if unknown, and more than k.
    """
    outside = 1.0 - np.exp(logprobs).sum(axis=1)
    complete = (logprobs > -np.inf).sum(axis=1) >= (all_ids or np.inf)
    with np.errstate(divide="ignore"):
        return np.log(np.where(complete, 0.0, np.clip(outside, _RESOLUTION, 1.0)))


def _row(entry: Mapping[str, Any] | None, position: int) -> dict[int, float]:
    """Return id -> logprob of one prompt token."""
    if not isinstance(entry, Mapping):
        raise DataError(
            f"prompt_logprobs[{position}] is invalid (found {entry!r}, expected an object)"
        )
    try:
        return {int(token): _number(value["logprob"]) for token, value in entry.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"prompt_logprobs[{position}] has no valid logprobs: {error!r}") from error


def _number(value: Any) -> float:
    number = -inf if value is None else float(value)
    if isnan(number):
        raise ValueError("NaN")
    return -inf if number <= _MINUS_INFINITY else number


def _most_likely(
    candidates: Mapping[int, float], token_id: int, k: int, known: NDArray[np.bool_] | None
) -> list[tuple[int, float]]:
    """Return the k most likely entries, without the prompt's token if it is the (k + 1)-th."""
    if len(candidates) > k + 1:
        raise DataError(
            f"too many prompt_logprobs (found {len(candidates)}, expected {k} or {k + 1})"
        )
    ranked = [pair for pair in candidates.items() if len(candidates) <= k or pair[0] != token_id]
    ranked.sort(key=lambda pair: -pair[1])
    return [
        (entry, logprob)
        for entry, logprob in ranked
        if logprob > -inf and (known is None or (0 <= entry < len(known) and known[entry]))
    ]
