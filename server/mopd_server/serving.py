"""Runs a loaded teacher as a server, from taking the port to the last answer after SIGTERM."""

import logging
import signal
import socket
import sys
from types import FrameType

import uvicorn

from mopd_protocol.errors import ConfigError
from mopd_protocol.manifest import Manifest
from mopd_server.app import create_app
from mopd_server.authentication import read_api_keys
from mopd_server.loading import load_service
from mopd_server.settings import ListenSettings, TeacherSettings

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


def serve(teacher: TeacherSettings, listen: ListenSettings) -> None:
    """Loads the teacher and answers until SIGTERM or Ctrl-C; requests in flight are finished.

    The port is taken first, so that one in use is found out before a model is loaded for it.

    Raises:
        MopdError: one sentence about what keeps this teacher from starting.
    """
    # uvicorn drains, then raises the signal that it caught once more: this is where it ends.
    signal.signal(signal.SIGTERM, _exit)
    _require_tls_pair(listen)
    api_keys = read_api_keys(listen.api_key_file)
    with bound_socket(listen.host, listen.port) as bound:
        service = load_service(teacher)
        address = _address(bound, tls=listen.tls_certificate is not None)
        sys.stdout.write(start_message(service.manifest, address, len(api_keys), listen.host))
        sys.stdout.flush()
        app = create_app(
            service,
            api_keys=api_keys,
            max_body_bytes=listen.max_body_bytes,
            request_timeout_seconds=listen.request_timeout_seconds,
        )
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            ssl_certfile=listen.tls_certificate,
            ssl_keyfile=listen.tls_key,
        )
        uvicorn.Server(config).run(sockets=[bound])


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


def _exit(number: int, frame: FrameType | None) -> None:
    logging.getLogger(__name__).info("stopped by %s", signal.Signals(number).name)
    sys.exit(0)
