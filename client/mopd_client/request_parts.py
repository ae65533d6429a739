"""``divide``: divide the sequences of a call into requests that a teacher service accepts, and that
all its replicas work on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mopd_client.transport.balance import Work, completion_tokens, prompt_tokens, work_of
from mopd_protocol.messages import json_text
from mopd_protocol.requests import SequenceRequest

#: Largest size of a request, a quarter or less of the service's limits. Smaller requests cost no
#: more processor time, and lose less when a connection breaks.
LIMITS = {
    "sequences": 1024,
    "bytes": 4 * 2**20,  # of the body
    "lists": 2**15,  # and objects of the body, such as candidate ids
    "entries": 4 * 2**20,  # of the response, id and logprob
}

#: Of the id that each sequence is sent with, and the comma behind the sequence.
_ID_BYTES = 32

#: Requests of a call to each of several replicas, if they have several prompts.
_REQUESTS_PER_REPLICA = 2
#: Difference from an equal share of the tokens at which the samples of a prompt are not divided.
_TOLERANCE = 0.125


@dataclass(frozen=True)
class Part:
    """A request of a call."""

    indices: list[int]
    of_prompts: bool = False
    """The sequences are samples of a prompt, others of which are part of another request."""


def divide(
    sequences: Sequence[SequenceRequest],
    top_k: int,
    *,
    replicas: int,
    cached_at: Callable[[Work], str],
) -> list[Part]:
    """Return the requests of a call, each within ``LIMITS`` or of one sequence.

    One replica gets consecutive sequences. For several, samples of a prompt are one request; they
    are divided only where shares of the tokens would differ by more than an eighth otherwise, and
    where a part has more completion tokens than the prompt, which is computed again.

    Args:
        replicas: number of available replicas.
        cached_at: address of the replica that has a prompt in its cache, or an empty text.
    """
    if replicas < 2:
        return [Part([*range(len(sequences))][each]) for each in parts_of(sequences, top_k)]
    works = [work_of([each]) for each in sequences]
    places = [cached_at(work) for work in works]
    tokens = [work.tokens for work in works]
    prompts: dict[object, list[int]] = {}
    for index in sorted(range(len(sequences)), key=places.__getitem__):
        prompts.setdefault(works[index].prompts or index, []).append(index)
    most = sum(tokens) / replicas / _REQUESTS_PER_REPLICA
    parts: list[Part] = []
    for share in _shares([*prompts.values()], sequences, tokens, replicas):
        requests: list[Part] = []
        filled, place = math.inf, ""
        for piece in share:
            size = sum(tokens[index] for index in piece.indices)
            if piece.of_prompts or places[piece.indices[0]] != place or filled + size > most:
                requests.append(Part([], piece.of_prompts))
                filled, place = 0, places[piece.indices[0]]
            requests[-1].indices.extend(piece.indices)
            filled = math.inf if piece.of_prompts else filled + size
        for request in requests:
            for part in parts_of([sequences[index] for index in request.indices], top_k):
                parts.append(Part(request.indices[part], request.of_prompts))
    return sorted(parts, key=lambda part: -sum(tokens[index] for index in part.indices))


def _shares(
    prompts: Sequence[Sequence[int]],
    sequences: Sequence[SequenceRequest],
    tokens: Sequence[int],
    count: int,
) -> list[list[Part]]:
    """Divide the samples of prompts, in order, into shares of about equal tokens."""
    order = [index for prompt in prompts for index in prompt]
    sums = [0, *accumulate(tokens[index] for index in order)]
    ends = [0, *accumulate(map(len, prompts))]
    cuts = [0]
    for number in range(1, count):
        target = sums[-1] * number / count

        def distance(cut: int, target: float = target) -> float:
            return abs(sums[cut] - target)

        cut = min(ends, key=distance)
        if distance(cut) > _TOLERANCE * sums[-1] / count:
            start, end = next((a, b) for a, b in pairwise(ends) if sums[a] < target < sums[b])
            start = max(start, cuts[-1])
            inside = min(range(start, end + 1), key=distance)
            completions = [completion_tokens(sequences[index]) for index in order[start:end]]
            before, behind = completions[: inside - start], completions[inside - start :]
            # The prompt is computed once more: a part needs as many completion tokens.
            if min(sum(before), sum(behind)) >= prompt_tokens(sequences[order[end - 1]]):
                cut = inside
        cuts.append(max(cut, cuts[-1]))
    return [
        [
            Part(order[max(start, first) : min(end, last)], of_prompts=start < first)
            for start, end in pairwise(ends)
            if max(start, first) < min(end, last)
        ]
        for first, last in pairwise([*cuts, len(order)])
    ]


def parts_of(sequences: Sequence[SequenceRequest], top_k: int) -> list[slice]:
    """Return consecutive parts, each within ``LIMITS`` or of one sequence."""
    parts: list[slice] = []
    start, total = 0, dict.fromkeys(LIMITS, 0)
    for index, sequence in enumerate(sequences):
        size = size_of(sequence, top_k)
        total = {name: total[name] + size[name] for name in LIMITS}
        if index > start and any(total[name] > limit for name, limit in LIMITS.items()):
            parts.append(slice(start, index))
            start, total = index, size
    return [*parts, slice(start, len(sequences))]


def size_of(sequence: SequenceRequest, top_k: int) -> dict[str, int]:
    """Return what a sequence adds to each of ``LIMITS``; entries are an upper bound for text."""
    candidates = sequence.candidate_ids or ()
    rows = (
        1
        + len(sequence.completion_token_ids or ())
        + len(sequence.completion_parts)
        + sum(len(text.encode(errors="replace")) for text in sequence.completion_texts)
    )
    return {
        "sequences": 1,
        "bytes": len(sequence.model_dump_json(exclude_none=True).encode()) + _ID_BYTES,
        "lists": 4 + 2 * len(sequence.messages or ()) + len(candidates) + _tool_lists(sequence),
        "entries": rows * max(top_k, max(map(len, candidates), default=0)),
    }


def _tool_lists(sequence: SequenceRequest) -> int:
    """Return an upper bound of the lists and objects of tools and tool calls."""
    calls = [call for each in sequence.messages or () for call in each.tool_calls or ()]
    texts = map(json_text, [*(call.model_dump() for call in calls), *(sequence.tools or ())])
    return sum(text.count("{") + text.count("[") + 1 for text in texts)
