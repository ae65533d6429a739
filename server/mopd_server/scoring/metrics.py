"""Prometheus metrics of scoring; ``http_metrics.py`` has those of requests and the process."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

#: Seconds, from a tiny request to a long batch on a large model.
PHASE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ServiceMetrics:
    """Metrics of one service, in a registry per service: one process may have several."""

    def __init__(
        self,
        *,
        queued_sequences: Callable[[], float],
        queued_tokens: Callable[[], float],
        tokens_by_key: Callable[[], Mapping[str, int]],
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self.tokens_scored = Counter(
            "mopd_tokens_scored", "Scored completion tokens.", registry=registry
        )
        self.prompt_tokens = Counter(
            "mopd_prompt_tokens", "Prompt tokens of scored sequences.", registry=registry
        )
        self.cancelled_sequences = Counter(
            "mopd_cancelled_sequences",
            "Sequences dropped before they were scored: client disconnected, or timeout.",
            registry=registry,
        )
        self.phase_seconds = Histogram(
            "mopd_phase_seconds",
            "Time of each scoring request by phase: tokenize, queue, prefill, encode.",
            ["phase"],
            buckets=PHASE_BUCKETS,
            registry=registry,
        )
        for name, meaning, function in (
            ("mopd_queue_sequences", "Sequences in the queue.", queued_sequences),
            ("mopd_queue_tokens", "Tokens in the queue.", queued_tokens),
        ):
            Gauge(name, meaning, registry=registry).set_function(function)
        registry.register(_KeyTokens(tokens_by_key))

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _KeyTokens(Collector):
    """Tokens in the queue of every API key that has used it."""

    def __init__(self, tokens_by_key: Callable[[], Mapping[str, int]]) -> None:
        self._tokens_by_key = tokens_by_key

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return one value per key; none without API keys."""
        family = GaugeMetricFamily(
            "mopd_key_queue_tokens", "Tokens in the queue, by API key.", labels=["key"]
        )
        for key, tokens in dict(self._tokens_by_key()).items():
            if key:
                family.add_metric([key], tokens)
        yield family
