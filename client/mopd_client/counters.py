"""``Counters``: what asking a teacher cost, for the trainer's journal."""

from dataclasses import dataclass, field


@dataclass
class Counters:
    """Totals over the answered and refused calls of ``score`` since the last ``take``.

    A call's seconds run from the moment it may be sent (not while it queues behind
    ``max_concurrency``) to its decoded answer, retries and their pauses included.
    """

    requests: int = 0  # calls of ``score``, however often each was sent
    retries: int = 0
    failures: int = 0  # calls that ended in an error or were cancelled
    tokens_scored: int = 0  # completion tokens, in the teacher's tokens
    seconds: list[float] = field(default_factory=list[float])  # one for each answered call

    def take(self) -> "Counters":
        """What was counted so far; counting begins anew."""
        taken = Counters(**vars(self))
        vars(self).update(vars(Counters()))
        return taken
