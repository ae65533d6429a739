"""Process of a teacher, from the first probe to the last response after SIGTERM.

The main thread loads the model, waits for a signal or for the end of the engine, drains, and
exits. HTTP runs in its own thread, from before the model is loaded.
"""

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.types import ASGIApp

from mopd_protocol.errors import ConfigError
from mopd_protocol.manifest import Manifest
from mopd_server.app import create_app
from mopd_server.engines.base import EngineCrashError
from mopd_server.exit_status import CRASH_STATUS
from mopd_server.http.lifecycle import Lifecycle
from mopd_server.http.middleware.authentication import ApiKeys
from mopd_server.http.middleware.quotas import KeyQuota
from mopd_server.pool.app import PREFIX, LifecycleGroup, PoolApp
from mopd_server.process.http_server import HttpServer
from mopd_server.process.listening import address_of
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import (
    GatewaySettings,
    ListenSettings,
    PoolSettings,
    TeacherSettings,
    TranslationSettings,
)

if TYPE_CHECKING:
    from mopd_server.pool.teacher_pool import TeacherPool

logger = logging.getLogger(__name__)

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")

#: Interval at which the main thread runs pending signal handlers.
_POLL_SECONDS = 0.5
#: For an engine to release its device; the process exits even if the engine hangs.
_CLOSE_SECONDS = 15.0
#: Afterwards, for the rest of the process.
_EXIT_SECONDS = 3.0


@dataclass(frozen=True)
class _Signal:
    number: signal.Signals


@dataclass(frozen=True)
class _Crash:
    cause: str


@dataclass(frozen=True)
class _Idle:
    """No request is in flight."""


_Event = _Signal | _Crash | _Idle
_Events = queue.SimpleQueue[_Event]


def serve(
    teacher: TeacherSettings,
    listen: ListenSettings,
    bound: socket.socket,
    pool: PoolSettings | None = None,
    translation: TranslationSettings | None = None,
    gateway: GatewaySettings | None = None,
) -> signal.Signals:
    """Load the teacher and serve until SIGTERM or Ctrl-C; requests in flight are finished.

    Probes get responses on ``bound`` while torch is imported and the model loads. With the models
    of ``pool``, ``teacher`` has the settings that all share. With a student of ``translation``,
    scores are returned in its ids, too; with ``gateway``, the teacher is at another address.
    Returns the signal.

    Raises:
        EngineCrashError: if the engine or the HTTP server stops.
        MopdError: if the teacher cannot start.
    """
    _require_tls_pair(listen)
    keys = ApiKeys.load(listen.api_key_file)
    require_known_names(teacher, keys)
    student = translation if translation and translation.student else None
    if pool and pool.models:
        if student is not None:
            raise ConfigError("--student: not supported with --models", key="student")
        loading = _Pooled(teacher, pool)
    else:
        loading = _Single(teacher, student, gateway)
    lifecycles = {
        name: Lifecycle(liveness_seconds=listen.liveness_seconds) for name in loading.settings
    }
    apps = {
        name: create_listening_app(lifecycle, listen, keys)
        for name, lifecycle in lifecycles.items()
    }
    group = LifecycleGroup(lifecycles)
    events: _Events = queue.SimpleQueue()
    http = HttpServer(
        loading.app(apps, group), listen, lambda: events.put(_Crash("the HTTP server has stopped"))
    )
    with _signals(events, keys) as queue_signals:
        address = address_of(bound, tls=listen.tls_certificate is not None)
        http.start(bound)
        models = ", ".join(settings.model for settings in loading.settings.values())
        logger.info("%s accepts probes; loading %s", address, models)
        try:
            with _closing(loading):
                for name, service in loading.load():
                    service.on_engine_crash = lambda cause: events.put(_Crash(cause))
                    lifecycles[name].service = service
                    sys.stdout.write(
                        start_message(
                            service.manifests, address + loading.path(name), len(keys), listen.host
                        )
                    )
                    sys.stdout.flush()
                    warm_up(service)
                # A full collection of torch's and transformers' objects takes 0.2 s.
                gc.collect()
                gc.freeze()
                queue_signals()
                try:
                    return _run_until_signal(events, http, group, listen.drain_seconds)
                finally:  # before the engine is closed: responses may still be in progress
                    http.stop()
        finally:
            http.stop()


class _Single:
    """One teacher, at the root of the address."""

    def __init__(
        self,
        teacher: TeacherSettings,
        translation: TranslationSettings | None,
        gateway: GatewaySettings | None,
    ) -> None:
        self.settings = {teacher.service_name: teacher}
        self._translation = translation
        self._gateway = gateway
        self._service: TeacherService | None = None

    def path(self, name: str) -> str:
        return ""

    def app(self, apps: Mapping[str, FastAPI], group: LifecycleGroup) -> ASGIApp:
        (app,) = apps.values()
        return app

    def load(self) -> Iterator[tuple[str, TeacherService]]:
        [(name, teacher)] = self.settings.items()
        if self._translation is None:
            self._service = TeacherService.load(teacher)
        else:
            from mopd_server.translation.loading import Student, add_translation, load_gateway

            student = Student.load(self._translation)  # takes a moment, the model may take minutes
            if self._gateway is None:
                self._service = TeacherService.load(teacher)
            else:
                self._service = load_gateway(self._gateway, self._translation)
            add_translation(self._service, student, self._translation)
        yield name, self._service

    def close(self) -> None:
        if self._service is not None:
            self._service.close()


class _Pooled:
    """Teachers of a pool, each below a path."""

    def __init__(self, teacher: TeacherSettings, pool: PoolSettings) -> None:
        if teacher.adapter:
            raise ConfigError("--adapter: not supported with --models", key="adapter")
        self.settings = {
            name: replace(teacher, model=model, name=name) for name, model in pool.models
        }
        if len(self.settings) != len(pool.models):
            raise ConfigError(
                f"--models: names occur twice (found {', '.join(name for name, _ in pool.models)})",
                key="models",
            )
        self._pool_settings = pool
        self._pool: TeacherPool | None = None

    def path(self, name: str) -> str:
        return f"{PREFIX}{name}"

    def app(self, apps: Mapping[str, FastAPI], group: LifecycleGroup) -> ASGIApp:
        return PoolApp(apps, group, lambda: b"" if self._pool is None else self._pool.exposition())

    def load(self) -> Iterator[tuple[str, TeacherService]]:
        from mopd_server.pool.teacher_pool import TeacherPool

        self._pool = TeacherPool(self.settings, self._pool_settings)
        yield from self._pool.load()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _run_until_signal(
    events: _Events, http: HttpServer, lifecycle: LifecycleGroup, drain_seconds: float
) -> signal.Signals:
    """Wait for a signal, then for the last response, a second signal, or the timeout."""
    code = "drained"
    try:
        event = _next_event(events)
        assert isinstance(event, _Signal | _Crash)
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
            if not isinstance(event, _Crash):
                logger.info("stopped by %s", number.name)
                return number
        code = "engine_dead"
        raise EngineCrashError(event.cause)
    finally:
        http.call(lambda: lifecycle.abort(code))


def _next_event(events: _Events) -> _Event:
    """Wait with a timeout: a signal that arrives just before this thread blocks would otherwise
    be handled only after the next event."""
    while True:
        try:
            return events.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            continue


@contextmanager
def _closing(teachers: "_Single | _Pooled") -> Generator[None]:
    """Close the teachers at the end; an engine that hangs does not block the exit."""
    try:
        yield
    finally:
        closing = threading.Thread(target=teachers.close, name="close", daemon=True)
        closing.start()
        closing.join(timeout=_CLOSE_SECONDS)
        if closing.is_alive():
            logger.error("the engine does not stop; exiting without it")
            timer = threading.Timer(_EXIT_SECONDS, os._exit, (CRASH_STATUS,))
            timer.daemon = True
            timer.start()


def create_listening_app(lifecycle: Lifecycle, listen: ListenSettings, keys: ApiKeys) -> FastAPI:
    """Create the application of a teacher with the limits of a request.

    Raises:
        ConfigError: if a quota is set without API keys.
    """
    return create_app(
        lifecycle,
        api_keys=keys,
        quota=_quota(listen, keys),
        max_body_bytes=listen.max_body_bytes,
        body_timeout_seconds=listen.body_timeout_seconds,
        request_timeout_seconds=listen.request_timeout_seconds,
    )


def warm_up(service: TeacherService) -> None:
    """Warm up a loaded service; blocks.

    Raises:
        ConfigError: if the teacher cannot score.
    """
    service.warm_up()
    if service.failure:
        raise ConfigError(
            f"teacher {service.manifest.service!r}: loaded, but cannot score: {service.failure}",
            key="model",
        )


@contextmanager
def _signals(events: _Events, keys: ApiKeys) -> Generator[Callable[[], None]]:
    """Yield a function after whose call signals are queued as events; before, they end the process.

    SIGHUP reloads the API keys.
    """
    queued = False

    def queue_signals() -> None:
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
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield queue_signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _quota(listen: ListenSettings, keys: ApiKeys) -> KeyQuota:
    quota = KeyQuota(
        tokens_per_minute=listen.key_tokens_per_minute,
        requests_in_flight=listen.key_requests_in_flight,
    )
    if quota != KeyQuota() and not keys.required:
        raise ConfigError(
            "--api-key-file: required by --key-tokens-per-minute and --key-requests-in-flight, "
            "which limit each API key",
            key="api_key_file",
        )
    return quota


def require_known_names(teacher: TeacherSettings, keys: ApiKeys) -> None:
    """Raise ConfigError if a weight is that of an unknown API key."""
    for name, _ in teacher.key_weights:
        if name not in keys.names:
            raise ConfigError(
                f"--key-weights: unknown API key (found {name!r}, expected one of "
                f"{', '.join(keys.names) or 'the keys of --api-key-file, which is not set'})",
                key="key_weights",
            )


def start_message(
    manifests: Mapping[str | None, Manifest], address: str, api_keys: int, host: str
) -> str:
    """Return the summary of the teacher, and of its adapters, printed at startup."""
    manifest = manifests[None]
    features = [name for name, supported in manifest.features.model_dump().items() if supported]
    lines = [
        f"mopd teacher {manifest.service!r}",
        f"  model      {manifest.model} (revision {manifest.revision[:12]}, {manifest.dtype})",
        f"  engine     {manifest.engine} {manifest.engine_version}",
        f"  tokenizer  {manifest.tokenizer_size} ids, fingerprint "
        f"{manifest.tokenizer_fingerprint[:12]}; head of {manifest.logit_width} rows",
        f"  limits     {manifest.max_model_len} tokens per sequence, top_k up to "
        f"{manifest.max_top_k}",
        f"  features   {', '.join(features) or 'none'}",
        f"  access     {f'{api_keys} API keys' if api_keys else 'no API key required'}",
        f"  manifest   {manifest.manifest_id}",
        f"  address    {address}  (documentation at {address}/docs)",
    ]
    lines += [
        f"  adapter    {name} at {address}/adapters/{name}, manifest {each.manifest_id}"
        for name, each in manifests.items()
        if name is not None
    ]
    if translation := manifest.translation:
        texts = ", ".join(f"{name} {share:.0%}" for name, share in translation.texts.items())
        lines += [
            f"  student    {translation.student}: {translation.verdict} for translation",
            f"             single tokens of the student: {texts}",
        ]
    if not api_keys and host not in LOOPBACK_HOSTS:
        lines.append("  warning    open to the network without API keys; see --api-key-file")
    return "\n".join(lines) + "\n"


def _require_tls_pair(listen: ListenSettings) -> None:
    if (listen.tls_certificate is None) != (listen.tls_key is None):
        raise ConfigError(
            "TLS: --tls-certificate and --tls-key must be set together", key="tls_certificate"
        )
    for path in (listen.tls_certificate, listen.tls_key):
        if path is not None and not path.is_file():
            raise ConfigError(f"TLS file {path}: not found", key="tls_certificate")
