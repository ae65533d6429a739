"""What ``/metrics`` says about requests and the process, from before a model is loaded."""

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

from mopd_server.http.problems import CLIENT_CLOSED_REQUEST
from mopd_server.http.request_record import RequestRecord
from mopd_server.scoring.metrics import PHASE_BUCKETS

#: Label of every path that is no route of ours, so that strangers cannot make new time series.
_OTHER_PATH = "other"
SCORING_PATH = "/v1/logprobs"
_PATHS = frozenset(
    {SCORING_PATH, "/v1/manifest", "/v1/tokenizer", "/healthz", "/readyz", "/metrics"}
)

#: Where a status has one usual cause, its name; else the status' own phrase.
_REASONS = {
    HTTPStatus.BAD_REQUEST: "malformed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "queue_full",
    HTTPStatus.SERVICE_UNAVAILABLE: "unavailable",
    HTTPStatus.GATEWAY_TIMEOUT: "deadline",
}


class HttpMetrics:
    """Counters of one application, in a registry of their own.

    There is no counter of engine deaths: a dead engine ends the process, and a counter would begin
    at zero with the next one. ``changes(process_start_time_seconds[1h])`` counts restarts.
    """

    def __init__(self, *, ready: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        build = Info("mopd_build", "What is running.", registry=self.registry)
        build.info({"version": _version(), "python": platform.python_version()})
        self._requests = Counter(
            "mopd_requests",
            "Answered requests by path and HTTP status.",
            ["path", "status"],
            registry=self.registry,
        )
        self._refused = Counter(
            "mopd_refused_requests",
            "Requests that were answered with an error, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._cancelled = Counter(
            "mopd_cancelled_requests",
            "Requests whose client closed the connection before the answer.",
            registry=self.registry,
        )
        self._seconds = Histogram(
            "mopd_request_seconds",
            "Time of answered scoring requests, from the request's head to the whole answer.",
            buckets=PHASE_BUCKETS,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "mopd_requests_in_flight",
            "Scoring requests that are being read or answered.",
            registry=self.registry,
        )
        Gauge(
            "mopd_ready", "1 while requests are welcome, else 0.", registry=self.registry
        ).set_function(lambda: float(ready()))

    def count(self, path: str, status: int, record: RequestRecord, seconds: float) -> None:
        """One answered request."""
        self._requests.labels(path if path in _PATHS else _OTHER_PATH, str(status)).inc()
        if status == CLIENT_CLOSED_REQUEST:
            self._cancelled.inc()
        elif status >= HTTPStatus.BAD_REQUEST:
            self._refused.labels(record.reason or _reason(status)).inc()
        elif path == SCORING_PATH:
            self._seconds.observe(seconds)

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)


def _reason(status: int) -> str:
    usual = _REASONS.get(HTTPStatus(status))
    return usual or HTTPStatus(status).phrase.lower().replace(" ", "_")


def _version() -> str:
    try:
        return version("mopd")
    except PackageNotFoundError:  # run from a folder that was never installed
        return "unknown"
