"""Autoscaling by the tokens in the queues of a teacher's replicas.

Ray Serve's controller unpickles this module by value: it imports the standard library only.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol

QUEUE_TOKENS = "queue_tokens"


class Context(Protocol):
    """The part of Ray Serve's ``AutoscalingContext`` that is used."""

    target_num_replicas: int
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None


class QueuePolicy:
    """One replica for ``queue_tokens`` tokens in the queues; Serve applies bounds and delays."""

    def __init__(self, queue_tokens: int) -> None:
        self._queue_tokens = queue_tokens

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and no state."""
        queues = (context.aggregated_metrics or {}).get(QUEUE_TOKENS)
        if not queues:  # no replica has reported yet
            return context.target_num_replicas, {}
        return math.ceil(sum(queues.values()) / self._queue_tokens), {}
