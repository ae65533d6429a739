"""Triton's interpreter as a Triton for CPUs, which vLLM's V2 model runner needs.

vLLM accepts Triton on a CPU if it has a backend of the name ``cpu``, which is found by its entry
point. The kernels do not use it: they are interpreted.
"""

import os
from pathlib import Path

_DRIVER = """
from triton.backends.driver import DriverBase

methods = dict.fromkeys(DriverBase.__abstractmethods__)
Driver = type("Driver", (DriverBase,), methods | {"is_active": staticmethod(lambda: True)})
"""
_COMPILER = """
from triton.backends.compiler import BaseBackend

Backend = type("Backend", (BaseBackend,), dict.fromkeys(BaseBackend.__abstractmethods__))
"""


def interpreting_environment(folder: Path) -> dict[str, str]:
    """Make the backend in ``folder``; return the variables of a process that uses it."""
    package, metadata = folder / "interpreted_triton", folder / "interpreted_triton-1.dist-info"
    for each in (package, metadata):
        each.mkdir(parents=True)
    (package / "driver.py").write_text(_DRIVER)
    (package / "compiler.py").write_text(_COMPILER)
    (metadata / "METADATA").write_text("Name: interpreted-triton\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[triton.backends]\ncpu = interpreted_triton\n")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
