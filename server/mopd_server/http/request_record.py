"""``RequestRecord``: what is known about the request under way, for logs, metrics and answers."""

import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field

#: A caller's own id is kept when it can stand in a header, a log line and a URI as it is.
_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass
class RequestRecord:
    """One request, filled in while it is answered. It never holds a key or a text."""

    id: str
    started: float = field(default_factory=time.monotonic)
    """``time.monotonic()`` when the request's head had been read."""
    key_name: str | None = None
    reason: str | None = None
    """Why it was refused, in a word."""
    sequences: int = 0
    top_k: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    phase_seconds: dict[str, float] = field(default_factory=dict[str, float])


_current: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def begin_record(asked_id: str) -> RequestRecord:
    """A new record for the request that this task answers, under the caller's id if it is sane."""
    record = RequestRecord(asked_id if _SANE_ID.fullmatch(asked_id) else uuid.uuid4().hex)
    _current.set(record)
    return record


def current_record() -> RequestRecord | None:
    """The record of the request that is being answered; ``None`` outside one."""
    return _current.get()
