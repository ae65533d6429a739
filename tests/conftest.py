"""Set up every test process: shape checks of the losses, one thread, the tiers, one random seed."""

import logging
import os
import sys
from collections.abc import Iterator

# Before torch is imported: one thread, so that sums are rounded identically everywhere; no network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from jaxtyping import install_import_hook

from tests.broker import Broker
from tests.shape_checks import checked
from tests.tiers import pytest_collection_modifyitems, pytest_runtest_protocol

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_protocol"]

# Before anything imports the losses: modules imported earlier are not checked.
install_import_hook("mopd_losses", f"{checked.__module__}.checked")


@pytest.fixture(autouse=True)
def fixed_torch_seed() -> None:
    """Seed torch's generator, so that a test does not depend on the tests that ran before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Undo the logging setup of a command line that ran in this process."""
    root = logging.getLogger()
    level, handlers = root.level, [*root.handlers]
    yield
    root.setLevel(level)
    for handler in [*root.handlers]:
        if handler not in handlers:
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """The teacher services of this session; a test that requests it is marked ``process``."""
    with Broker(tmp_path_factory.mktemp("services")) as services:
        yield services
