"""``RequestRecord``: facts about the current request for logs, metrics and responses."""

import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field

#: Request ids of callers are accepted if they are safe in a header, a log line and a URI.
_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass
class RequestRecord:
    """One request; updated until its response. Never contains a key or a text."""

    id: str
    started: float = field(default_factory=time.monotonic)
    """``time.monotonic()`` after the request's headers."""
    adapter: str | None = None
    key_name: str | None = None
    reason: str | None = None
    """Code of the error response."""
    body_hash: str | None = None
    """Hash of the body of a scoring request, once the body is complete."""
    sequences: int = 0
    top_k: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    phase_seconds: dict[str, float] = field(default_factory=dict[str, float])


_current: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def begin_record(caller_id: str) -> RequestRecord:
    """Create the record of the current task's request, with the caller's id if it is safe."""
    record = RequestRecord(caller_id if _SAFE_ID.fullmatch(caller_id) else uuid.uuid4().hex)
    _current.set(record)
    return record


def current_record() -> RequestRecord | None:
    """Return the record of the current request; ``None`` outside one."""
    return _current.get()
