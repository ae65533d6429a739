"""The client stays light: a fresh interpreter that imports all of it loads nothing heavy."""

import pkgutil

import pytest

import mopd_client
from tests.protocol.test_imports import loaded_by

pytestmark = pytest.mark.smoke

HEAVY = {"torch", "transformers", "fastapi", "mopd_server", "mopd_losses", "mopd_trainer"}


def test_importing_the_whole_client_loads_nothing_heavy():
    files = pkgutil.iter_modules(mopd_client.__path__)
    modules = [f"mopd_client.{file.name}" for file in files]

    loaded = loaded_by(", ".join(modules))

    assert not loaded & HEAVY
    assert {"httpx", "mopd_protocol"} <= loaded
