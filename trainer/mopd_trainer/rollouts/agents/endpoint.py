"""``Endpoint``: students of running trajectories for clients of the OpenAI API."""

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mopd_protocol.errors import DataError, MopdError
from mopd_protocol.messages import Message, json_text
from mopd_protocol.samples import Rollout
from mopd_trainer.rollouts.agents.session import Session

_MAX_BODY = 64 * 2**20
#: Parameters of a request that decide how it is sampled, which the run's settings do.
_SAMPLING = {
    *("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "model", "user"),
    *("parallel_tool_calls", "store", "metadata", "service_tier"),
}
#: Parameters with the only value that is supported, if they are present.
_NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "stream": False,
    "logprobs": False,
    "tool_choice": "auto",
    "stop": [],
    "frequency_penalty": 0,
    "presence_penalty": 0,
}


class Endpoint:
    """Serve ``POST /sessions/ID/v1/chat/completions`` on this machine, from a thread.

    The server starts with the first address that is requested. An address has a secret id.

    Args:
        loop: of the sessions.
        new_session: session of requests to ``/v1`` without an id; None: there are none.
        port: 0 for a free one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        new_session: Callable[[], Session] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._loop = loop
        self._new_session = new_session
        self._address = host, port
        self._sessions: dict[str, Session] = {}
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> str:
        """Start the server, unless it runs; return its address.

        Raises:
            OSError: if the port is in use.
        """
        if self._server is None:
            endpoint = self

            class Handler(_Handler):
                def session(self) -> Session | None:
                    return endpoint.session_of(self.path)

                loop = self._loop

            self._server = ThreadingHTTPServer(self._address, Handler)
            self._server.daemon_threads = True
            threading.Thread(target=self._server.serve_forever, daemon=True).start()
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def url_of(self, session: Session) -> str:
        """Return the base address of a session."""
        name = next((n for n, each in self._sessions.items() if each is session), None)
        if name is None:
            name = secrets.token_urlsafe(12)
            self._sessions[name] = session
        return f"{self.start()}/sessions/{name}/v1"

    def session_of(self, path: str) -> Session | None:
        """Return the session of a request's path; None if there is none."""
        parts = path.partition("?")[0].strip("/").split("/")
        if parts[:1] == ["sessions"] and parts[2:] == ["v1", "chat", "completions"]:
            return self._sessions.get(parts[1])
        is_plain = parts == ["v1", "chat", "completions"] and self._new_session is not None
        return self._new_session() if is_plain and self._new_session else None

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 600
    loop: asyncio.AbstractEventLoop

    def session(self) -> Session | None:
        """Return the session of the path."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Return the list of models, of which there is one."""
        models = [{"id": "student", "object": "model", "owned_by": "mopd"}]
        self._send(HTTPStatus.OK, {"object": "list", "data": models})

    def do_POST(self) -> None:
        """Return the student's next message."""
        size = int(self.headers.get("Content-Length") or 0)
        # A browser sends other pages' text, but JSON only if this server permits it.
        if self.headers.get_content_type() != "application/json":
            self.close_connection = True
            self._fail(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type: expected application/json")
            return
        if size > _MAX_BODY:
            self.close_connection = True
            self._fail(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"body above {_MAX_BODY} bytes")
            return
        body = self.rfile.read(size)
        session = self.session()
        if session is None:
            self._fail(HTTPStatus.NOT_FOUND, f"{self.path}: not found")
            return
        try:
            fields = _fields(body)
            reply = session.respond(fields["messages"], fields.get("tools") or ())
            message, rollout = asyncio.run_coroutine_threadsafe(reply, self.loop).result()
        except DataError as error:
            self._fail(HTTPStatus.BAD_REQUEST, str(error), code=session.ended)
        except (MopdError, CancelledError, RuntimeError) as error:
            self._fail(HTTPStatus.INTERNAL_SERVER_ERROR, str(error) or type(error).__name__)
        else:
            self._send(HTTPStatus.OK, _completion(message, rollout))

    def _fail(self, status: HTTPStatus, message: str, *, code: str | None = None) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        self._send(status, {"error": {"message": message, "type": kind, "code": code}})

    def _send(self, status: HTTPStatus, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        # Clients of OpenAI repeat requests with status 500: the trajectory fails at once.
        self.send_header("x-should-retry", "false")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _fields(body: bytes) -> dict[str, Any]:
    """Return the messages and tools of a request.

    Raises:
        DataError: for parameters that would change the completion and are unsupported.
    """
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"body: no JSON ({error})", key="body") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("messages"), list):  # pyright: ignore[reportUnknownMemberType]
        raise DataError("messages: not found, expected a list", key="messages")
    for name, value in fields.items():  # pyright: ignore[reportUnknownVariableType]
        if name in ("messages", "tools", *_SAMPLING) or value in (None, _NEUTRAL.get(name)):  # pyright: ignore[reportUnknownArgumentType]
            continue
        expected = f"expected {_NEUTRAL[name]!r}" if name in _NEUTRAL else "unsupported"
        raise DataError(f"{name}: found {value!r:.40}, {expected}", key=str(name))  # pyright: ignore[reportUnknownArgumentType]
    return fields  # pyright: ignore[reportUnknownVariableType]


def _completion(message: Message, rollout: Rollout) -> dict[str, Any]:
    fields = message.model_dump()
    for call in fields.get("tool_calls", ()):
        call["function"]["arguments"] = json_text(call["function"]["arguments"])
    reason = "tool_calls" if message.tool_calls else rollout.finish_reason
    prompt, completion = len(rollout.prompt_token_ids), len(rollout.completion)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "student",
        "choices": [{"index": 0, "message": fields, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }
