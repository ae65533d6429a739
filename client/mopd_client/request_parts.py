"""``parts_of``: divide the sequences of a call into requests that a teacher service accepts."""

from collections.abc import Sequence

from mopd_protocol.messages import json_text
from mopd_protocol.requests import SequenceRequest

#: Largest size of a request, a quarter or less of the service's limits. Smaller requests cost no
#: more processor time, reach several replicas, and lose less when a connection breaks.
LIMITS = {
    "sequences": 1024,
    "bytes": 4 * 2**20,  # of the body
    "lists": 2**15,  # and objects of the body, such as candidate ids
    "entries": 4 * 2**20,  # of the response, id and logprob
}

#: Of the id that each sequence is sent with, and the comma behind the sequence.
_ID_BYTES = 32


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
