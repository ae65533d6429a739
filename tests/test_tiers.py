"""The groups of tests that share an engine, a cluster or services."""

import pytest


def test_the_group_of_a_test_reaches_the_scheduler(request: pytest.FixtureRequest) -> None:
    """xdist reads it from the id; a pytest that does not show it there runs two engines at once."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@tests/test_tiers.py")
