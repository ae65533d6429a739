"""``Counters``: cost of scoring with one teacher, for the trainer's journal."""

from collections import deque
from dataclasses import dataclass, field

#: Durations of requests that are kept until ``pop``: more than a step has.
MOST_DURATIONS = 2**16


@dataclass
class ReplicaCounts:
    """Requests to one replica since the last ``Counters.pop``; every attempt counts."""

    requests: int = 0
    tokens: int = 0  # scored, of prompts and completions, estimated for text
    failures: int = 0  # no response, 429, 502, 503 or 504


@dataclass
class Counters:
    """Totals since the last ``pop``.

    A request counts once, however often it is sent: a call of ``score``, or one sequence of a call
    to a stock vLLM server. Its seconds run from the free slot (not while waiting for
    ``max_concurrency``) to the response, retries and their pauses included.
    """

    requests: int = 0
    retries: int = 0
    failures: int = 0  # calls of ``score`` that raised or were cancelled
    tokens_scored: int = 0  # completion tokens, in the teacher's tokens
    seconds: deque[float] = field(default_factory=lambda: deque[float](maxlen=MOST_DURATIONS))
    """Durations of the latest successful requests."""
    received_bytes: int = 0  # response bodies
    breaker_openings: int = 0  # circuit breakers opened by consecutive failures
    cache_hits: int = 0  # sequences whose score was loaded from disk
    cache_misses: int = 0  # sequences requested although a score store is set
    cache_corrupt: int = 0  # unreadable files among the misses
    cache_unwritten: int = 0  # scores not saved because of a disk error
    waits: int = 0  # repeated waits after a failed call (``on_error: wait``)
    fallbacks: int = 0  # samples scored by another teacher (``on_error: fallback:…``)
    spot_checks: int = 0  # requests that verify scores; the fields above do not count them
    spot_check_tokens: int = 0  # completion tokens that were scored again

    rejected_replicas: int = 0  # discovered replicas with the manifest of another teacher
    replicas: dict[str, ReplicaCounts] = field(default_factory=dict[str, ReplicaCounts])
    """By address."""

    def replica(self, url: str) -> ReplicaCounts:
        """Return the counts of one replica."""
        return self.replicas.setdefault(url, ReplicaCounts())

    def pop(self) -> "Counters":
        """Return the totals and reset them."""
        totals = Counters(**vars(self))
        vars(self).update(vars(Counters()))
        return totals
