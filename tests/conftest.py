"""Shared configuration: shape checks of the losses, and tests that are independent of order."""

import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

from tests.shape_checks import checked

# Must precede any import of the losses: modules that are already imported are not checked.
install_import_hook("mopd_losses", f"{checked.__module__}.checked")

# Every run tests a property on the same examples, however slow the machine, so that a failure is
# reproducible. ``pytest --hypothesis-profile=others`` draws new examples.
settings.register_profile("others", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deterministic", settings.get_profile("others"), derandomize=True)
settings.load_profile("deterministic")


@pytest.fixture(autouse=True)
def fixed_torch_seed() -> None:
    """Seed torch's global generator, so that no test depends on the tests before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Restore the root logger after a test: a command line run in process configures it."""
    root = logging.getLogger()
    level, handlers = root.level, [*root.handlers]
    yield
    root.setLevel(level)
    for handler in [*root.handlers]:
        if handler not in handlers:
            root.removeHandler(handler)
