"""The groups of tests that share an engine, a cluster or services."""

import pytest


def test_the_group_of_a_test_reaches_the_scheduler(request: pytest.FixtureRequest) -> None:
    """xdist reads the group from the id; otherwise both workers start every engine."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@tests/test_tiers.py")
