"""Available memory: the system's, or what a container's limit leaves."""

from pathlib import Path

import pytest

from mopd_protocol.runtime.host_memory import available_memory

GIB = 1024**3


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        ({"memory.max": "max", "memory.current": 5}, 8 * GIB),
        ({"memory.max": 4 * GIB, "memory.current": GIB}, 3 * GIB),
        ({"memory.max": 4 * GIB, "memory.current": 5 * GIB}, 0),
        ({"memory.max": 64 * GIB, "memory.current": GIB}, 8 * GIB),
        (
            {"memory/memory.limit_in_bytes": 2 * GIB, "memory/memory.usage_in_bytes": GIB},
            GIB,
        ),
    ],
)
def test_available_memory(tmp_path: Path, files: dict[str, object], expected: int) -> None:
    contents = {f"sys/fs/cgroup/{name}": f"{value}\n" for name, value in files.items()}
    contents["proc/meminfo"] = f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n"
    for name, text in contents.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_memory(tmp_path) == expected
