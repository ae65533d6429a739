"""Distributions of completion tokens from the hidden states of vLLM's steps.

vLLM computes the log-probabilities of every token of a prompt. A teacher needs those of the
completion, whose positions a request contains: the head is applied to the positions that predict
completion tokens only, in chunks, and nothing else leaves the worker.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopd_server.engines.distributions import TruncatedRows, truncated_rows

#: Key of the request in ``SamplingParams.extra_args``.
ARGUMENT = "mopd_rows"

#: Logits of hidden states; None on a worker that does not receive them.
Head = Callable[[Tensor], Tensor | None]


#: Ids ``[rows, k]``, log-probabilities ``[rows, k + 2]`` and ranks ``[rows]``, see ``pop``.
Arrays = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class RowRequest:
    """Rows of one sequence: its last ``len(tokens)`` tokens are scored."""

    start: int
    """Position that predicts the first of ``tokens``: one before its own."""
    tokens: NDArray[np.int32]  # [rows]
    top_k: int
    temperature: float
    candidates: NDArray[np.int32] | None = None  # [rows, k], -1 where missing; instead of top_k

    def encode(self) -> dict[str, Any]:
        """Return ``SamplingParams.extra_args``, which vLLM sends to its workers."""
        values = {
            "start": self.start,
            "tokens": self.tokens.astype(np.int32).tobytes(),
            "top_k": self.top_k,
            "temperature": self.temperature,
        }
        if self.candidates is not None:
            values["candidates"] = self.candidates.astype(np.int32).tobytes()
        return {ARGUMENT: values}

    @classmethod
    def decode(cls, arguments: dict[str, Any]) -> "RowRequest":
        """Return the request of ``extra_args``."""
        values = arguments[ARGUMENT]
        tokens = np.frombuffer(values["tokens"], dtype=np.int32)
        candidates = values.get("candidates")
        if candidates is not None:
            candidates = np.frombuffer(candidates, dtype=np.int32).reshape(len(tokens), -1)
        return cls(values["start"], tokens, values["top_k"], values["temperature"], candidates)


@dataclass(frozen=True)
class ScheduledTokens:
    """Tokens of one sequence in one step."""

    request_id: str
    first: int  # position in the sequence
    count: int
    offset: int  # of the first in the hidden states of the step


@dataclass(eq=False)
class _Progress:
    request: RowRequest
    rows: int = 0  # computed, or missing, so far
    parts: list[Arrays] = field(default_factory=list[Arrays])

    def next_rows(self, tokens: ScheduledTokens) -> range:
        """Return the rows that a step computes, without those of positions that a preempted
        sequence computes again."""
        start = self.request.start
        first = max(tokens.first - start, self.rows)
        return range(first, min(tokens.first - start + tokens.count, len(self.request.tokens)))


class CompletionRows:
    """Rows of all sequences in progress.

    Args:
        head: logits of hidden states, called equally often on all workers; overwritten.
        width: rows of the head.
        device: of the hidden states.
    """

    def __init__(self, head: Head, width: int, device: torch.device) -> None:
        self._head = head
        self._width = width
        self._device = device
        self._progress: dict[str, _Progress] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._progress

    def add(self, request_id: str, arguments: dict[str, Any]) -> None:
        """Add a sequence by its ``SamplingParams.extra_args``; restart one that is known."""
        self._progress[request_id] = _Progress(RowRequest.decode(arguments))

    def remove(self, request_id: str) -> None:
        """Forget a sequence, if it is known."""
        self._progress.pop(request_id, None)

    def keep_only(self, request_ids: Sequence[str]) -> None:
        """Forget all other sequences."""
        if len(self._progress) > len(request_ids):
            known = self._progress
            self._progress = {name: known[name] for name in request_ids if name in known}

    def compute(self, hidden_states: Tensor, scheduled: Sequence[ScheduledTokens]) -> None:
        """Compute the rows that the hidden states ``[tokens, hidden]`` of a step determine.

        Sequences with equal settings share the calls of the head.
        """
        groups: dict[tuple[object, ...], list[tuple[ScheduledTokens, range]]] = defaultdict(list)
        for tokens in scheduled:
            progress = self._progress[tokens.request_id]
            if rows := progress.next_rows(tokens):
                request = progress.request
                width = None if request.candidates is None else request.candidates.shape[1]
                groups[request.top_k, request.temperature, width].append((tokens, rows))
        for members in groups.values():
            self._compute_group(hidden_states, members)

    def pop(self, request_id: str) -> Arrays:
        """Remove a sequence; return its arrays.

        The columns of the log-probabilities are those of the completion token, of the ids, and the
        tail. The ranks of completion tokens are 0 with candidates. There are fewer rows than tokens
        if a cached prefix contained some of their positions.
        """
        parts = self._progress.pop(request_id).parts
        if not parts:
            none = torch.empty((0, 0), dtype=torch.int32)
            return none, torch.empty((0, 2)), none.view(-1)
        ids, logprobs, ranks = zip(*parts, strict=True)
        return torch.cat(ids), torch.cat(logprobs), torch.cat(ranks)

    def _compute_group(
        self, hidden_states: Tensor, members: Sequence[tuple[ScheduledTokens, range]]
    ) -> None:
        requests = [self._progress[tokens.request_id].request for tokens, _ in members]
        positions = [
            np.arange(rows.start, rows.stop) + (request.start - tokens.first + tokens.offset)
            for (tokens, rows), request in zip(members, requests, strict=True)
        ]
        inputs = hidden_states[self._tensor(np.concatenate(positions))]
        scored = [r.tokens[_slice(rows)] for (_, rows), r in zip(members, requests, strict=True)]
        candidates = [
            request.candidates[_slice(rows)]
            for (_, rows), request in zip(members, requests, strict=True)
            if request.candidates is not None
        ]
        first = requests[0]
        chunks = truncated_rows(
            lambda chunk: self._head(inputs[chunk]),
            self._tensor(np.concatenate(scored)),
            self._width,
            top_k=first.top_k,
            candidates=self._tensor(np.concatenate(candidates)) if candidates else None,
            temperature=first.temperature,
        )
        for tokens, rows in members:
            self._progress[tokens.request_id].rows = rows.stop
        if not chunks:  # this worker does not receive logits
            return
        packed = _pack(chunks)
        start = 0
        for tokens, rows in members:
            part = slice(start, start + len(rows))
            ids, logprobs, ranks = (each[part] for each in packed)
            self._progress[tokens.request_id].parts.append((ids, logprobs, ranks))
            start = part.stop

    def _tensor(self, ids: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self._device)


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def _pack(chunks: Sequence[TruncatedRows]) -> Arrays:
    columns = [
        (rows.token_logprobs[:, None], rows.logprobs, rows.tail_logprobs[:, None])
        for rows in chunks
    ]
    ids = torch.cat([rows.ids.to(torch.int32) for rows in chunks])
    ranks = [
        torch.zeros_like(rows.tail_logprobs) if rows.token_ranks is None else rows.token_ranks
        for rows in chunks
    ]
    logprobs = torch.cat([torch.cat(row, dim=1) for row in columns])
    return ids, logprobs, torch.cat(ranks).to(torch.int32)
