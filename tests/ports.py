"""Free ports for servers that bind them seconds after a test has chosen them."""

import random
import socket
from pathlib import Path

#: Ray assigns ports below it to its workers.
_LOWEST = 20_000
_assigned: set[int] = set()


def free_port() -> int:
    """Return an unused port outside the kernel's ephemeral range, each at most once.

    The kernel assigns ephemeral ports to outgoing connections, including those that poll for the
    server under test, so that such a port may be in use when the server binds it.
    """
    while True:
        port = random.SystemRandom().randrange(_LOWEST, _first_ephemeral_port())
        if port in _assigned:
            continue
        try:
            with socket.create_server(("", port)):
                _assigned.add(port)
                return port
        except OSError:  # in use
            continue


def _first_ephemeral_port() -> int:
    setting = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(setting.read_text().split()[0]) if setting.exists() else 49_152  # IANA's range
    return max(first, _LOWEST + 1_000)
