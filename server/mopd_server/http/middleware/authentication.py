"""Bearer API keys: who may ask this teacher."""

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
from mopd_server.http.http_metrics import SCORING_PATH
from mopd_server.http.middleware.quotas import Quotas
from mopd_server.http.problems import problem_response, refusal_response
from mopd_server.http.request_record import current_record
from mopd_server.service_error import ServiceError

logger = logging.getLogger(__name__)

KEYS_VARIABLE = "MOPD_API_KEYS"

_NAMED_KEY = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,64})(?::\s*|\s+)(?P<key>\S+)")

#: What a client can send behind ``Bearer``: a key of anything else would open to nobody.
_SENDABLE_KEY = re.compile(r"[!-~]+")

#: Tells one state of a file from another: time of change, size, and which file it is.
_FileState = tuple[int, int, int]


@dataclass(frozen=True)
class ApiKey:
    """A key that opens, under the name that logs and quotas know it by."""

    name: str
    digest: bytes


class ApiKeys:
    """The keys of a file and of the environment. The file is read again when it has changed.

    A line is ``KEY``, ``NAME KEY`` or ``NAME:KEY``; empty lines and those that begin with ``#`` are
    skipped. A key without a name is called by its place, ``key-1``.
    """

    def __init__(self, fixed: Sequence[str] = (), file: Path | None = None) -> None:
        self._fixed = _parsed(fixed, f"{KEYS_VARIABLE}, key")
        self._file = file
        self._seen: _FileState | None = None
        self._from_file: tuple[ApiKey, ...] = ()
        self.asked = bool(self._fixed) or file is not None
        """Whether a key is needed at all. Decided once: an emptied file lets nobody in."""

    @classmethod
    def read(cls, file: Path | None) -> "ApiKeys":
        """Keys of ``file`` (one a line) and of the environment (comma-separated).

        Raises:
            ConfigError: when the file cannot be read, holds no key (which would let nobody in), or
                a line that is none.
        """
        keys = cls(os.environ.get(KEYS_VARIABLE, "").split(","), file)
        if file is not None:
            keys._seen = _state(file)
            keys._from_file = _read(file)
            if not keys._from_file:
                raise ConfigError(f"{file} holds no API key; expected one a line")
        return keys

    def __len__(self) -> int:
        return len(self._fixed) + len(self._from_file)

    def name_of(self, key: str) -> str | None:
        """The name of this key, ``None`` where it does not open.

        Compares with every key, in constant time, whatever the key's length.
        """
        self.refresh()
        asked = _digest(key)
        found: str | None = None
        for known in (*self._from_file, *self._fixed):
            if hmac.compare_digest(asked, known.digest):
                found = known.name
        return found

    def refresh(self) -> None:
        """Reads the file again if it has changed; keeps the keys of before when it cannot."""
        if self._file is None or (state := _state(self._file)) == self._seen:
            return
        self._seen = state
        try:
            self._from_file = _read(self._file)
        except ConfigError as error:
            logger.error("%s; the keys of before still open", error)
            return
        logger.info("read %d API keys again", len(self._from_file))


class RequireApiKey:
    """ASGI middleware: ``/v1/`` answers only to a known key, before any of the body is read.

    Health, metrics and documentation stay open: probes carry no keys, and none of them tells
    what is being trained.
    """

    def __init__(self, app: ASGIApp, api_keys: ApiKeys, quotas: Quotas) -> None:
        self._app = app
        self._api_keys = api_keys
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what is allowed, answers 401 to the rest, and 429 beyond a key's quota."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        name = self._api_keys.name_of(key.strip()) if kind.lower() == "bearer" else None
        if name is None:
            found = "an unknown key" if key else "no key"
            refused = problem_response(
                HTTPStatus.UNAUTHORIZED,
                f"found {found}; expected a header 'Authorization: Bearer KEY'",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refused(scope, receive, send)
            return
        if record := current_record():
            record.key_name = name
        with ExitStack() as turns:
            if scope["path"] == SCORING_PATH:
                try:
                    turns.enter_context(self._quotas.turn(name))
                except ServiceError as refusal:
                    await refusal_response(refusal)(scope, receive, send)
                    return
            await self._app(scope, receive, send)


def _parsed(lines: Iterable[str], place: str) -> tuple[ApiKey, ...]:
    """The keys of ``lines``; errors name ``place`` and the line, never the key."""
    keys: list[ApiKey] = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        named = _NAMED_KEY.fullmatch(line)
        name, key = named.group("name", "key") if named else (f"key-{len(keys) + 1}", line)
        if not _SENDABLE_KEY.fullmatch(key):
            raise ConfigError(
                f"{place} {number} is no API key: it has characters that no client can send in a "
                "key (spaces, or others than printable ASCII); expected KEY or NAME KEY, the name "
                "of letters, digits, '_', '.' and '-', and nothing behind the key"
            )
        keys.append(ApiKey(name, _digest(key)))
    return tuple(keys)


def _read(file: Path) -> tuple[ApiKey, ...]:
    try:
        # Some editors write a byte order mark, which would be part of the first key.
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the API keys in {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the API keys in {file}: it is not UTF-8 text") from error
    return _parsed(lines, f"{file}, line")


def _state(file: Path) -> _FileState | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
