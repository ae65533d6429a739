"""Log formats: text, or one JSON object per line. Both include the id of the request."""

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mopd_server.http.request_record import current_record
from mopd_server.settings import LogFormat

#: Attribute of a log record with named values: ``extra={FIELDS: {"status": 200}}``.
FIELDS = "fields"


def configure_logs(level: str, log_format: LogFormat) -> None:
    """Log to stderr from ``level`` on. Call before heavy imports."""
    if log_format == "json":  # progress bars are not JSON
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class TextFormatter(logging.Formatter):
    """``2026-01-31 12:00:00,000 INFO name: message key=value``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line with the named values at its end."""
        values = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = super().formatMessage(record)
        return f"{line} {values}" if values else line


class JsonFormatter(logging.Formatter):
    """``{"time": ..., "level": ..., "logger": ..., "message": ..., named values}``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line for any message."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: Mapping[str, Any] = getattr(record, FIELDS, {})
    request = current_record()
    return {**({"request_id": request.id} if request else {}), **fields}
