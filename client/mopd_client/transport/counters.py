"""``Counters``: what asking a teacher cost, for the trainer's journal."""

from dataclasses import dataclass, field


@dataclass
class Counters:
    """Totals since the last ``take``.

    A question is what is sent as one request, however often: a call of ``score``, or one sequence
    of it where a stock vLLM server is asked. Its seconds run from the moment it may be sent (not
    while it queues behind ``max_concurrency``) to its answer, retries and their pauses included.
    """

    requests: int = 0  # questions
    retries: int = 0
    failures: int = 0  # calls of ``score`` that ended in an error or were cancelled
    tokens_scored: int = 0  # completion tokens that were answered, in the teacher's tokens
    seconds: list[float] = field(default_factory=list[float])  # one for each answered question
    received_bytes: int = 0  # of answers: their bodies
    breaker_openings: int = 0  # replicas that began to be left alone after failures in a row
    hedges_won: int = 0  # second requests whose answer came first
    hedges_lost: int = 0  # second requests that were sent for nothing
    cache_hits: int = 0  # sequences whose score was read from disk
    cache_misses: int = 0  # sequences that were asked for although there is a cache
    cache_corrupt: int = 0  # unreadable files among the misses
    cache_unwritten: int = 0  # scores that the disk did not take
    waits: int = 0  # times that a run waited on after a call had failed (``on_error: wait``)
    fallbacks: int = 0  # samples that were given to another teacher (``on_error: fallback:…``)

    def take(self) -> "Counters":
        """What was counted so far; counting begins anew."""
        taken = Counters(**vars(self))
        vars(self).update(vars(Counters()))
        return taken
