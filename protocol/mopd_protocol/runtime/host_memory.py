"""Memory of the host that a CPU engine may use for its key-value cache."""

import os
from pathlib import Path

#: Share of the available memory, so that two teachers and a student start on one host, and limit.
_CACHE_SHARE = 0.25
_MAX_CACHE_BYTES = 8 * 1024**3


def cpu_cache_bytes(engines: int = 1) -> int:
    """Return the size of a key-value cache in CPU memory, of one of several engines.

    vLLM's own default is a share of all memory, and fails where other processes use some of it.
    """
    return min(int(available_memory() * _CACHE_SHARE), _MAX_CACHE_BYTES) // engines


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that the system, and the container's limit, leave to this process.

    Args:
        root: of ``/proc`` and ``/sys``.
    """
    system = _system(root / "proc/meminfo")
    groups = root / "sys/fs/cgroup"
    version1 = groups / "memory"
    limits = (
        (groups / "memory.max", groups / "memory.current"),
        (version1 / "memory.limit_in_bytes", version1 / "memory.usage_in_bytes"),
    )
    return min(system, *(_left(limit, usage, system) for limit, usage in limits))


def _system(meminfo: Path) -> int:
    if not meminfo.is_file():  # not Linux: half of all memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _left(limit: Path, usage: Path, system: int) -> int:
    try:
        text = limit.read_text().strip()
        return system if text == "max" else max(int(text) - int(usage.read_text()), 0)
    except OSError:  # no such limit
        return system
