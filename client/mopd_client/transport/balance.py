"""``Balance``: the replica of each request: the fewest tokens in flight, or the prompt's cache.

A replica computes a prompt once and keeps it in its prefix cache. A request goes to the replica
that computed its prompts last, unless that replica has more than ``BUSIEST`` times the mean tokens
in flight and one batch; every other request goes to the replica with the fewest tokens in flight.
A hash of the prompt in place of the replica that had it last would distribute few prompts unevenly.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from mopd_client.transport.replica import Replica
from mopd_protocol.requests import SequenceRequest

#: Load, as a multiple of the mean, above which a replica gets no request for its cache's sake. With
#: 8 samples of each prompt, sent one by one to 4 replicas, simulated replicas compute up to 1.1
#: times the prompt tokens of one, 1.9 times with a factor of 1.0, 3.7 times if nothing follows.
BUSIEST = 2.0
#: Tokens that a replica computes at once (``mopd-teacher --max-batch-tokens``).
BATCH_TOKENS = 16_384
#: Tokens of later requests after which a prompt is no longer expected in a replica's cache.
CACHED_TOKENS = 2**18
#: Prompts that are remembered: more than a step has.
MOST_PROMPTS = 2**14
#: Shorter prompts cost less than a request that waits.
LEAST_PROMPT_TOKENS = 32
_BYTES_PER_TOKEN = 4

_PROMPT = {"messages", "chat_template_kwargs", "tools", "prompt", "prompt_token_ids"}


@dataclass(frozen=True)
class Work:
    """Tokens of a request, and the digests of its prompts."""

    tokens: int = 0
    prompts: frozenset[bytes] = frozenset()


#: Of a request that is not for scoring.
NO_WORK = Work()


def work_of(sequences: Sequence[SequenceRequest]) -> Work:
    """Return the tokens of sequences, prompts and completions, estimated for text."""
    prompts = frozenset(
        blake2b(each.model_dump_json(include=_PROMPT).encode(), digest_size=16).digest()
        for each in sequences
        if prompt_tokens(each) >= LEAST_PROMPT_TOKENS
    )
    return Work(sum(prompt_tokens(s) + completion_tokens(s) for s in sequences), prompts)


def prompt_tokens(sequence: SequenceRequest) -> int:
    """Return the number of prompt tokens, estimated for text."""
    if sequence.prompt_token_ids is not None:
        return len(sequence.prompt_token_ids)
    return _estimate(sequence.prompt_texts)


def completion_tokens(sequence: SequenceRequest) -> int:
    """Return the number of completion tokens, estimated for text."""
    ids = sequence.completion_token_ids
    return _estimate(sequence.completion_texts) if ids is None else len(ids)


def _estimate(texts: Sequence[str]) -> int:
    return -(-sum(len(text.encode(errors="replace")) for text in texts) // _BYTES_PER_TOKEN)


class Balance:
    """Choice between the replicas of one teacher, and where its prompts were sent."""

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[Replica, int]] = {}  # and its tokens sent until then

    def choose(
        self, replicas: Sequence[Replica], work: Work, *, now: float, failed: Replica | None
    ) -> Replica:
        """Choose the replica of the next attempt.

        Args:
            now: clock seconds.
            failed: replica of the last attempt, chosen only if no other is available.
        """
        usable = [r for r in replicas if r is not failed and r.available_at <= now]
        cached = self.cached_at(work, usable)
        if cached is not None:
            mean = (sum(r.in_flight for r in usable) + work.tokens) / len(usable)
            if cached.in_flight <= BUSIEST * mean + BATCH_TOKENS:
                return cached
        return min(
            replicas,
            key=lambda r: (max(0.0, r.available_at - now), r is failed, r.in_flight, r.sent),
        )

    def cached_at(self, work: Work, replicas: Sequence[Replica]) -> Replica | None:
        """Return the replica that probably has most of the prompts in its cache."""
        places = (self._places.get(prompt) for prompt in work.prompts)
        counts = Counter(
            place[0]
            for place in places
            if place and place[0] in replicas and place[0].sent - place[1] <= CACHED_TOKENS
        )
        return max(counts, key=counts.__getitem__, default=None)

    def record(self, replica: Replica, work: Work) -> None:
        """Record that a request is sent to a replica."""
        replica.sent += work.tokens
        for prompt in work.prompts:
            self._places.pop(prompt, None)
            self._places[prompt] = replica, replica.sent
        while len(self._places) > MOST_PROMPTS:
            del self._places[next(iter(self._places))]

    def add(self, replica: Replica, others: Sequence[Replica]) -> None:
        """Assign an equal share of the known prompts to a new replica."""
        replica.sent = min((each.sent for each in others), default=0)
        for prompt in [*self._places][:: len(others) + 1] if others else ():
            del self._places[prompt]
