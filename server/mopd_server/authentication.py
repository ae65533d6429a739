"""Bearer API keys: who may ask this teacher."""

import hashlib
import hmac
import os
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mopd_protocol.errors import ConfigError
from mopd_server.problems import problem_response

KEYS_VARIABLE = "MOPD_API_KEYS"


def read_api_keys(file: Path | None) -> tuple[str, ...]:
    """Keys of ``file`` (one a line) and of the environment (comma-separated); empty for no auth.

    Raises:
        ConfigError: when the file cannot be read, or holds no key (which would let everybody in).
    """
    from_environment = _keys(os.environ.get(KEYS_VARIABLE, "").split(","))
    if file is None:
        return from_environment
    try:
        from_file = _keys(file.read_text(encoding="utf-8").splitlines())
    except OSError as error:
        raise ConfigError(f"cannot read the API keys in {file}: {error.strerror}") from error
    if not from_file:
        raise ConfigError(f"{file} holds no API key; expected one a line")
    return (*from_file, *from_environment)


class RequireApiKey:
    """ASGI middleware: ``/v1/`` answers only to a known key, before any of the body is read.

    Health, metrics and documentation stay open: probes carry no keys, and none of them tells
    what is being trained.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what is allowed, answers 401 to the rest."""
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not self._is_known(key.strip()):
                found = "an unknown key" if key else "no key"
                refused = problem_response(
                    HTTPStatus.UNAUTHORIZED,
                    f"found {found}; expected a header 'Authorization: Bearer KEY'",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_known(self, key: str) -> bool:
        """Compares with every key, in constant time, whatever the key's length."""
        asked = _digest(key)
        matches = [hmac.compare_digest(asked, known) for known in self._digests]
        return any(matches)


def _keys(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(line.strip() for line in lines if line.strip())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
