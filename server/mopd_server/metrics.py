"""What an operator sees on ``/metrics`` (Prometheus)."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: From a cached tiny request to a long batch on a large model, seconds.
_PHASE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

#: Label of every path that is no route of ours, so that strangers cannot make new time series.
_OTHER_PATH = "other"
_PATHS = frozenset(
    {"/v1/logprobs", "/v1/manifest", "/v1/tokenizer", "/healthz", "/readyz", "/metrics"}
)


class ServiceMetrics:
    """Counters of one service, in a registry of their own (several can live in one process)."""

    def __init__(
        self, *, waiting_sequences: Callable[[], float], waiting_tokens: Callable[[], float]
    ) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "mopd_requests",
            "Answered requests by path and HTTP status.",
            ["path", "status"],
            registry=self.registry,
        )
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
        self.phase_seconds = Histogram(
            "mopd_phase_seconds",
            "Time of each scoring request by phase: tokenize, queue, prefill, encode.",
            ["phase"],
            buckets=_PHASE_BUCKETS,
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


class CountRequests:
    """ASGI middleware: one count per answered request."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything on and reads the status that goes by."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500  # what the server answers when no response was begun

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = scope["path"] if scope["path"] in _PATHS else _OTHER_PATH
        try:
            await self._app(scope, receive, watch)
        finally:
            self._metrics.requests.labels(path, str(status)).inc()
