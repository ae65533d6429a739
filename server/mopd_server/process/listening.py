"""Binding of the port, before anything slow is imported."""

import socket

from mopd_protocol.errors import ConfigError

#: Connections that wait until HTTP is served.
_BACKLOG = 2048


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address; connections wait until they are accepted.

    Raises:
        ConfigError: if the address does not exist on this machine or is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on host {host!r}: {error.strerror}", key="host"
        ) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)  # binding does not reserve the port yet
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another --port (0: any "
            "free port).",
            key="port",
        ) from error
    return bound


def address_of(bound: socket.socket, *, tls: bool) -> str:
    """Return the address for clients: ``http://127.0.0.1:8101``."""
    host, port = bound.getsockname()[:2]
    if bound.family == socket.AF_INET6:
        host = f"[{host}]"
    return f"{'https' if tls else 'http'}://{host}:{port}"
