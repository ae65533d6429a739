"""What ``/metrics`` says about scoring (Prometheus); ``http_metrics.py`` has the rest."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

#: From a cached tiny request to a long batch on a large model, seconds.
PHASE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ServiceMetrics:
    """Counters of one service, in a registry of their own (several can live in one process)."""

    def __init__(
        self, *, waiting_sequences: Callable[[], float], waiting_tokens: Callable[[], float]
    ) -> None:
        self.registry = CollectorRegistry()
        self.tokens_scored = Counter(
            "mopd_tokens_scored",
            "Completion tokens that were given a distribution.",
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "mopd_prompt_tokens",
            "Prompt tokens that were read before completions.",
            registry=self.registry,
        )
        self.cancelled_sequences = Counter(
            "mopd_cancelled_sequences",
            "Sequences given up before they were scored, because a client left or time ran out.",
            registry=self.registry,
        )
        self.phase_seconds = Histogram(
            "mopd_phase_seconds",
            "Time of each scoring request by phase: tokenize, queue, prefill, encode.",
            ["phase"],
            buckets=PHASE_BUCKETS,
            registry=self.registry,
        )
        Gauge(
            "mopd_queue_sequences", "Sequences that wait for the engine.", registry=self.registry
        ).set_function(waiting_sequences)
        Gauge(
            "mopd_queue_tokens", "Tokens that wait for the engine.", registry=self.registry
        ).set_function(waiting_tokens)

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
