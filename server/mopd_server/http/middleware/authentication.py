"""Bearer API keys."""

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mopd_protocol.errors import ConfigError
from mopd_server.http.http_metrics import SCORING_PATHS, requires_key
from mopd_server.http.middleware.quotas import Quotas
from mopd_server.http.problems import error_response, problem_response
from mopd_server.http.request_record import current_record
from mopd_server.service_error import ServiceError

logger = logging.getLogger(__name__)

KEYS_VARIABLE = "MOPD_API_KEYS"

_NAMED_KEY = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,64})(?::\s*|\s+)(?P<key>\S+)")

#: Characters that a client can send after ``Bearer``; a key with others could never match.
_VALID_KEY = re.compile(r"[!-~]+")

#: Identity of a version of a file: modification time, size, inode.
_FileVersion = tuple[int, int, int]


@dataclass(frozen=True)
class ApiKey:
    """A valid key, by the name for logs and quotas."""

    name: str
    digest: bytes


class ApiKeys:
    """Keys of a file, reloaded on change, and of the environment.

    A line is ``KEY``, ``NAME KEY`` or ``NAME:KEY``; empty lines and comments (``#``) are skipped.
    A key without a name is named by its position, ``key-1``.
    """

    def __init__(self, fixed: Sequence[str] = (), file: Path | None = None) -> None:
        self._fixed = _parse(fixed, f"{KEYS_VARIABLE}, key")
        self._file = file
        self._version: _FileVersion | None = None
        self._from_file: tuple[ApiKey, ...] = ()
        self.required = bool(self._fixed) or file is not None
        """True if requests need a key. Constant: an emptied file denies all access."""

    @classmethod
    def load(cls, file: Path | None) -> "ApiKeys":
        """Load the keys of ``file`` (one per line) and of the environment (comma-separated).

        Raises:
            ConfigError: if the file is unreadable or contains no key, or a line is invalid.
        """
        keys = cls(os.environ.get(KEYS_VARIABLE, "").split(","), file)
        if file is not None:
            keys._version = _version(file)
            keys._from_file = _load(file)
            if not keys._from_file:
                raise ConfigError(
                    f"{file}: no API key found (expected one per line)", key="api_key_file"
                )
        return keys

    def __len__(self) -> int:
        return len(self._fixed) + len(self._from_file)

    @property
    def names(self) -> list[str]:
        """Names of all keys."""
        return [key.name for key in (*self._from_file, *self._fixed)]

    def name_of(self, key: str) -> str | None:
        """Return the name of a valid key, else ``None``.

        Compares with every key, in constant time for any length.
        """
        self.refresh()
        digest = _digest(key)
        name: str | None = None
        for valid in (*self._from_file, *self._fixed):
            if hmac.compare_digest(digest, valid.digest):
                name = valid.name
        return name

    def refresh(self) -> None:
        """Reload the file if it has changed; keep the previous keys if that fails."""
        if self._file is None or (version := _version(self._file)) == self._version:
            return
        self._version = version
        try:
            self._from_file = _load(self._file)
        except ConfigError as error:
            logger.error("%s; keeping the previous API keys", error)
            return
        logger.info("reloaded %d API keys", len(self._from_file))


class ApiKeyMiddleware:
    """ASGI middleware: scoring and ``/v1/`` need a valid key, checked before the body is read.

    Health, metrics and documentation need no key: probes have none, and these routes reveal
    nothing about the training.
    """

    def __init__(self, app: ASGIApp, api_keys: ApiKeys, quotas: Quotas) -> None:
        self._app = app
        self._api_keys = api_keys
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with 401 without a valid key, and with 429 above the quota of a key."""
        if scope["type"] != "http" or not requires_key(scope["path"]):
            await self._app(scope, receive, send)
            return
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        name = self._api_keys.name_of(key.strip()) if kind.lower() == "bearer" else None
        if name is None:
            problem = "an unknown key" if key else "no key"
            response = problem_response(
                HTTPStatus.UNAUTHORIZED,
                f"authentication failed (found {problem}, expected a header 'Authorization: Bearer "
                "KEY')",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await response(scope, receive, send)
            return
        if record := current_record():
            record.key_name = name
        with ExitStack() as stack:
            if scope["path"] in SCORING_PATHS:
                try:
                    stack.enter_context(self._quotas.request(name))
                except ServiceError as error:
                    await error_response(error)(scope, receive, send)
                    return
            await self._app(scope, receive, send)


def _parse(lines: Iterable[str], source: str) -> tuple[ApiKey, ...]:
    """Parse ``lines``; errors contain ``source`` and the line number, never the key."""
    keys: list[ApiKey] = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        named = _NAMED_KEY.fullmatch(line)
        name, key = named.group("name", "key") if named else (f"key-{len(keys) + 1}", line)
        if not _VALID_KEY.fullmatch(key):
            raise ConfigError(
                f"{source} {number}: invalid API key (found spaces, or characters other than "
                "printable ASCII, expected KEY or NAME KEY, the name of letters, digits, '_', '.' "
                "and '-', and nothing after the key)",
                key="api_key_file",
            )
        keys.append(ApiKey(name, _digest(key)))
    return tuple(keys)


def _load(file: Path) -> tuple[ApiKey, ...]:
    try:
        # Some editors add a byte order mark, which would be part of the first key.
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(
            f"{file}: reading the API keys failed: {problem}", key="api_key_file"
        ) from error
    return _parse(lines, f"{file}, line")


def _version(file: Path) -> _FileVersion | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
