"""Ports for servers that a test starts, which take them only seconds later."""

import random
import socket
from pathlib import Path

#: Below it are the ports that Ray gives its workers.
_LOWEST = 20_000
_given: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on now, and that nobody gets who asks for any.

    Out of those the kernel serves every outgoing connection, also those that wait for this very
    server, and one that it gives away is in use when the server comes.
    """
    while True:
        port = random.SystemRandom().randrange(_LOWEST, _first_of_the_kernels())
        if port in _given:
            continue
        try:
            with socket.create_server(("", port)):
                _given.add(port)
                return port
        except OSError:  # somebody has it
            continue


def _first_of_the_kernels() -> int:
    told = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(told.read_text().split()[0]) if told.exists() else 49_152  # as IANA has it
    return max(first, _LOWEST + 1_000)
