"""For all tests of this process: the losses' shapes are checked, and no test hangs on another."""

import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

from tests.shape_checks import checked

# Before anything imports the losses: what is imported already is not checked.
install_import_hook("mopd_losses", f"{checked.__module__}.checked")

# A property is tried on the same examples by every run, however slow the machine: what fails, fails
# for whoever broke it. ``pytest --hypothesis-profile=others`` tries it on examples of its own.
settings.register_profile("others", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("alike", settings.get_profile("others"), derandomize=True)
settings.load_profile("alike")


@pytest.fixture(autouse=True)
def draws_of_its_own() -> None:
    """What a test draws from torch's generator does not hang on which tests were before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command line that ran in a test sets up logging for its process, which is this one."""
    root = logging.getLogger()
    level, handlers = root.level, [*root.handlers]
    yield
    root.setLevel(level)
    for handler in [*root.handlers]:
        if handler not in handlers:
            root.removeHandler(handler)
