"""Outcome of one HTTP request: final or transient, its Retry-After, its error message."""

import json
import ssl
from typing import Any

import httpx

#: Statuses of failures that may pass; all other statuses are final.
RETRIED_STATUSES = frozenset({429, 502, 503, 504})

#: Upper limit of a Retry-After header: a number of a thousand digits is infinite as a float.
_LONGEST_PAUSE_SECONDS = 86_400.0
#: Characters of a body without a problem document (a proxy's HTML page) that a message quotes.
_QUOTED_CHARACTERS = 200

Outcome = httpx.Response | httpx.RequestError | TimeoutError


def certificate_problem(outcome: Outcome) -> str | None:
    """Return why a server's certificate was rejected; None for other outcomes."""
    error: BaseException | None = outcome if isinstance(outcome, httpx.ConnectError) else None
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message
        error = error.__cause__ or error.__context__
    return None


def is_final(outcome: Outcome) -> bool:
    """Return True for a response of the teacher, False for a transient failure."""
    return isinstance(outcome, httpx.Response) and outcome.status_code not in RETRIED_STATUSES


def requested_pause(response: httpx.Response) -> float:
    """Return the seconds of a Retry-After header; 0 for its date form and for final statuses."""
    if response.status_code not in RETRIED_STATUSES:
        return 0.0
    seconds = response.headers.get("retry-after", "").strip()
    return min(float(seconds), _LONGEST_PAUSE_SECONDS) if seconds.isdecimal() else 0.0


def problem_of(response: httpx.Response) -> str:
    """Return a problem document's detail, an OpenAI error's message, or the start of the body."""
    try:
        document: Any = json.loads(response.content)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        error: Any = document.get("error")
        message: Any = error.get("message") if isinstance(error, dict) else None
        problem: Any = document.get("detail") or document.get("title") or message
        if problem:
            return str(problem)
    return response.text.strip()[:_QUOTED_CHARACTERS] or response.reason_phrase
