"""Prometheus metrics of requests and the process, available before a model is loaded."""

import platform
from collections.abc import Callable
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)

from mopd_server.http.request_record import RequestRecord
from mopd_server.scoring.metrics import PHASE_BUCKETS
from mopd_server.service_error import CLIENT_CLOSED_REQUEST, default_code

#: Label of all unknown paths: clients must not be able to create new time series.
_OTHER_PATH = "other"
SCORING_PATHS = frozenset({"/v1/logprobs", "/v1/completions", "/generate"})
_PATHS = frozenset(
    {
        *SCORING_PATHS,
        "/v1/manifest",
        "/v1/models",
        "/v1/tokenizer",
        "/health",
        "/healthz",
        "/readyz",
        "/metrics",
    }
)


def requires_key(path: str) -> bool:
    """Return whether a path reveals the teacher or uses its engine."""
    return path.startswith("/v1/") or path in SCORING_PATHS


class HttpMetrics:
    """Metrics of one application, in a registry per application.

    There is no counter of crashes: a crashed engine ends the process, and the counter would
    restart at zero. ``changes(process_start_time_seconds[1h])`` counts restarts.
    """

    def __init__(self, *, ready: Callable[[], bool]) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        build = Info("mopd_build", "Versions of mopd and Python.", registry=registry)
        build.info({"version": _version(), "python": platform.python_version()})
        self._requests = Counter(
            "mopd_requests",
            "Finished requests by path and HTTP status.",
            ["path", "status"],
            registry=registry,
        )
        self._errors = Counter(
            "mopd_request_errors",
            "Requests with an error response, by the code of the error.",
            ["reason"],
            registry=registry,
        )
        self._cancelled = Counter(
            "mopd_cancelled_requests",
            "Requests whose client disconnected before the response.",
            registry=registry,
        )
        self._seconds = Histogram(
            "mopd_request_seconds",
            "Duration of successful scoring requests, from the headers to the end of the response.",
            buckets=PHASE_BUCKETS,
            registry=registry,
        )
        self._key_requests = Counter(
            "mopd_key_requests",
            "Finished scoring requests by API key and HTTP status.",
            ["key", "status"],
            registry=registry,
        )
        self._key_tokens = Counter(
            "mopd_key_tokens",
            "Tokens of scored sequences by API key and kind: prompt, completion.",
            ["key", "kind"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "mopd_requests_in_flight", "Scoring requests in progress.", registry=registry
        )
        Gauge(
            "mopd_ready", "1 while the teacher accepts scoring requests, else 0.", registry=registry
        ).set_function(lambda: float(ready()))

    def count(self, path: str, status: int, record: RequestRecord, seconds: float) -> None:
        """Count one finished request."""
        self._requests.labels(path if path in _PATHS else _OTHER_PATH, str(status)).inc()
        if path in SCORING_PATHS and (key := record.key_name):
            self._key_requests.labels(key, str(status)).inc()
            if status < HTTPStatus.BAD_REQUEST:
                self._key_tokens.labels(key, "prompt").inc(record.prompt_tokens)
                self._key_tokens.labels(key, "completion").inc(record.completion_tokens)
        if status == CLIENT_CLOSED_REQUEST:
            self._cancelled.inc()
        elif status >= HTTPStatus.BAD_REQUEST:
            self._errors.labels(record.reason or default_code(status)).inc()
        elif path in SCORING_PATHS:
            self._seconds.observe(seconds)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _version() -> str:
    try:
        return version("mopd")
    except PackageNotFoundError:  # a source tree that was never installed
        return "unknown"
