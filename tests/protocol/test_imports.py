"""The protocol stays light: a fresh interpreter that imports all of it loads nothing heavy."""

import pkgutil
import subprocess
import sys

import pytest

import mopd_protocol

pytestmark = pytest.mark.smoke

HEAVY = {"torch", "transformers", "fastapi", "httpx", "mopd_client", "mopd_server", "mopd_losses"}


def loaded_by(module: str) -> set[str]:
    """Top-level packages in a fresh interpreter after importing ``module``."""
    program = f"import sys, {module}; sys.stdout.write(' '.join(sys.modules))"
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in finished.stdout.split()}


def test_importing_the_whole_protocol_loads_nothing_heavy():
    modules = [
        f"mopd_protocol.{module.name}" for module in pkgutil.iter_modules(mopd_protocol.__path__)
    ]

    assert not loaded_by(", ".join(modules)) & HEAVY


@pytest.mark.parametrize("module", ["json", "httpx"])
def test_the_probe_sees_what_is_loaded(module):
    assert module in loaded_by(module)
