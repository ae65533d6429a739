"""Runs a teacher as a server, from taking the port to the last answer after SIGTERM.

The main thread is the process's life: it loads the model, waits for a signal or for the engine's
death, drains, and leaves. HTTP is answered on a thread of its own, from before the model is loaded.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from mopd_protocol.errors import ConfigError, MopdError
from mopd_protocol.manifest import Manifest
from mopd_server.app import create_app
from mopd_server.http.lifecycle import Lifecycle
from mopd_server.http.middleware.authentication import ApiKeys
from mopd_server.http.middleware.quotas import KeyQuota
from mopd_server.process.http_server import HttpServer
from mopd_server.scoring.loading import load_service
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import ListenSettings, TeacherSettings

logger = logging.getLogger(__name__)

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")

#: Between two looks of the main thread whether a signal has come.
_LOOK_UP_SECONDS = 0.5
#: For an engine to let go of its device; one that hangs does not keep the process.
_CLOSE_SECONDS = 15.0
#: Then, for the rest of the process.
_LEAVE_SECONDS = 3.0

#: Exit status of a teacher whose engine died, or would not stop: a supervisor should restart it.
DIED_STATUS = 3


class TeacherDied(MopdError):
    """A running teacher cannot go on; only a new process brings it back."""


@dataclass(frozen=True)
class _Signal:
    number: signal.Signals


@dataclass(frozen=True)
class _Death:
    cause: str


@dataclass(frozen=True)
class _Idle:
    """The last request has been answered."""


_Event = _Signal | _Death | _Idle
_Events = queue.SimpleQueue[_Event]


def serve(teacher: TeacherSettings, listen: ListenSettings) -> signal.Signals:
    """Loads the teacher and answers until SIGTERM or Ctrl-C; requests in flight are finished.

    The port is taken first, so that one in use is found out before a model is loaded for it, and
    probes are answered while it loads. Returns the signal that ended it.

    Raises:
        TeacherDied: when its engine ended it.
        MopdError: one sentence about what keeps this teacher from starting.
    """
    _require_tls_pair(listen)
    keys = ApiKeys.read(listen.api_key_file)
    lifecycle = Lifecycle()
    app = create_app(
        lifecycle,
        api_keys=keys,
        quota=_quota(listen, keys),
        max_body_bytes=listen.max_body_bytes,
        body_timeout_seconds=listen.body_timeout_seconds,
        request_timeout_seconds=listen.request_timeout_seconds,
    )
    events: _Events = queue.SimpleQueue()
    http = HttpServer(app, listen, lambda: events.put(_Death("the HTTP server has stopped")))
    with bound_socket(listen.host, listen.port) as bound, _signals(events, keys) as queue_signals:
        address = _address(bound, tls=listen.tls_certificate is not None)
        http.start(bound)
        logger.info("%s answers probes; loading %s", address, teacher.model)
        try:
            with _loaded(teacher) as service:
                service.on_engine_death = lambda cause: events.put(_Death(cause))
                lifecycle.service = service
                sys.stdout.write(start_message(service.manifest, address, len(keys), listen.host))
                sys.stdout.flush()
                _warm_up(service)
                queue_signals()
                try:
                    return _until_the_end(events, http, lifecycle, listen.drain_seconds)
                finally:  # before the engine is let go: answers may still be under way
                    http.stop()
        finally:
            http.stop()


def _until_the_end(
    events: _Events, http: HttpServer, lifecycle: Lifecycle, drain_seconds: float
) -> signal.Signals:
    """Waits for a signal, then for the last answer, a second signal, or the end of the time."""
    reason = "drained"
    sentence = "this teacher has shut down; ask another replica, or again later"
    try:
        event = _next_event(events)
        assert isinstance(event, _Signal | _Death)
        if isinstance(event, _Signal):
            number = event.number
            logger.info("%s: finishing %d requests", number.name, lifecycle.in_flight)
            http.call(lambda: lifecycle.drain(lambda: events.put(_Idle())))
            try:
                event = events.get(timeout=drain_seconds)
            except queue.Empty:
                logger.warning(
                    "%d requests are not finished after %g s", lifecycle.in_flight, drain_seconds
                )
            if not isinstance(event, _Death):
                logger.info("stopped by %s", number.name)
                return number
        reason = "engine_dead"
        sentence = "this teacher's engine has died; ask another replica, or again later"
        raise TeacherDied(event.cause)
    finally:
        http.call(lambda: lifecycle.abandon(reason, sentence))


def _next_event(events: _Events) -> _Event:
    """Waits, and looks up now and then: a signal that comes while this thread waits for its turn to
    run, just before it waits here, is only heard when it runs again."""
    while True:
        try:
            return events.get(timeout=_LOOK_UP_SECONDS)
        except queue.Empty:
            continue


@contextmanager
def _loaded(teacher: TeacherSettings) -> Generator[TeacherService]:
    """The service, let go of at the end; an engine that hangs does not keep the process."""
    service = load_service(teacher)
    try:
        yield service
    finally:
        closing = threading.Thread(target=service.close, name="close", daemon=True)
        closing.start()
        closing.join(timeout=_CLOSE_SECONDS)
        if closing.is_alive():
            logger.error("the engine does not stop; leaving without it")
            leaving = threading.Timer(_LEAVE_SECONDS, os._exit, (DIED_STATUS,))
            leaving.daemon = True
            leaving.start()


def _warm_up(service: TeacherService) -> None:
    service.warm_up()
    if service.failure:
        raise ConfigError(
            f"teacher {service.manifest.service!r} was loaded but cannot score: {service.failure}"
        )


@contextmanager
def _signals(events: _Events, keys: ApiKeys) -> Generator[Callable[[], None]]:
    """Until the function that this gives is called, signals end the process; then they are queued.

    SIGHUP, which would end it, only reads the API keys again.
    """
    queued = False

    def queue_them() -> None:
        nonlocal queued
        queued = True

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            keys.refresh()
        elif queued:
            events.put(_Signal(signal.Signals(number)))
        else:
            logger.info("stopped by %s", signal.Signals(number).name)
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(0)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield queue_them
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _quota(listen: ListenSettings, keys: ApiKeys) -> KeyQuota:
    quota = KeyQuota(
        tokens_per_minute=listen.key_tokens_per_minute,
        requests_in_flight=listen.key_requests_in_flight,
    )
    if quota != KeyQuota() and not keys.asked:
        raise ConfigError(
            "a quota is for each API key, and this teacher asks for none; expected --api-key-file "
            "beside --key-tokens-per-minute and --key-requests-in-flight"
        )
    return quota


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening.

    Raises:
        ConfigError: when the address does not exist here or is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on host {host!r}: {error.strerror}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; "
            "choose another --port (0 takes a free one)"
        ) from error
    return bound


def start_message(manifest: Manifest, address: str, api_keys: int, host: str) -> str:
    """What will be served, for the person who started it."""
    features = [name for name, offered in manifest.features.model_dump().items() if offered]
    lines = [
        f"mopd teacher {manifest.service!r}",
        f"  model      {manifest.model} (revision {manifest.revision[:12]}, {manifest.dtype})",
        f"  engine     {manifest.engine} {manifest.engine_version}",
        f"  tokenizer  {manifest.tokenizer_size} ids, fingerprint "
        f"{manifest.tokenizer_fingerprint[:12]}; head of {manifest.logit_width} rows",
        f"  limits     {manifest.max_model_len} tokens a sequence, top_k up to "
        f"{manifest.max_top_k}",
        f"  features   {', '.join(features) or 'none'}",
        f"  access     {f'{api_keys} API keys' if api_keys else 'no API key asked'}",
        f"  manifest   {manifest.manifest_id}",
        f"  address    {address}  (documentation at {address}/docs)",
    ]
    if not api_keys and host not in LOOPBACK_HOSTS:
        lines.append("  warning    open to the network without API keys; see --api-key-file")
    return "\n".join(lines) + "\n"


def _address(bound: socket.socket, *, tls: bool) -> str:
    host, port = bound.getsockname()[:2]
    if bound.family == socket.AF_INET6:
        host = f"[{host}]"
    return f"{'https' if tls else 'http'}://{host}:{port}"


def _require_tls_pair(listen: ListenSettings) -> None:
    if (listen.tls_certificate is None) != (listen.tls_key is None):
        raise ConfigError("TLS needs both --tls-certificate and --tls-key, or neither")
    for path in (listen.tls_certificate, listen.tls_key):
        if path is not None and not path.is_file():
            raise ConfigError(f"there is no TLS file {path}")
