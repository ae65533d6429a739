"""The tiers of the suite, as a pytest plugin: marks, xdist groups and hypothesis profiles.

``make test`` deselects ``process``, ``slow`` and ``vllm`` but keeps ``smoke``; ``make test-all``
runs these, and the properties again with more examples. Tests that start a Python process without
one of the marks fail, so that none enters ``make test`` by accident.
"""

import os
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

#: Marks of tests that may start a Python process.
_PROCESS_MARKS = frozenset({"process", "smoke", "slow", "vllm", "packaging", "nightly", "doors"})
_PROCESS_FIXTURES = frozenset({"broker"})
_PYTHON_PROGRAMS = ("python", "mopd", "torchrun", "ray")

#: Profile -> factor of the number of examples, which is never reduced below ``_FEWEST``.
_EXAMPLES = {"dev": 1 / 3, "full": 1.0, "nightly": 5.0}
_FEWEST = 5

_running: list[pytest.Item] = []


def _register_profiles() -> None:
    """Register ``dev``, ``full`` (the same examples in every run) and ``nightly`` (others)."""
    settings.register_profile(
        "nightly", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
    )
    for name in ("full", "dev"):
        settings.register_profile(name, settings.get_profile("nightly"), derandomize=True)
    settings.load_profile("dev")


_register_profiles()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their fixtures, group them for xdist, and scale their hypothesis examples."""
    factor = _EXAMPLES[config.getoption("--hypothesis-profile") or "dev"]
    scaled: set[int] = set()
    for item in items:
        if _PROCESS_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("process")
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))
        function: Any = getattr(item, "obj", None)
        current = getattr(function, "_hypothesis_internal_use_settings", None)
        if current is None and hasattr(function, "hypothesis"):
            current = settings.default
        if current is not None and id(function) not in scaled:
            scaled.add(id(function))
            examples = max(round(current.max_examples * factor), min(_FEWEST, current.max_examples))
            function._hypothesis_internal_use_settings = settings(current, max_examples=examples)


def _group(item: pytest.Item) -> str | None:
    """The xdist group: one engine, one cluster, one broker; else the file, for its fixtures."""
    if item.get_closest_marker("xdist_group"):
        return None
    if item.get_closest_marker("vllm"):
        return "vllm"
    if _PROCESS_FIXTURES & set(getattr(item, "fixturenames", ())):
        return "services"
    if "tests/losses/" in item.nodeid:  # no fixtures worth sharing, and the longest files
        return None
    return item.nodeid.partition("::")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Remember which test is running."""
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


def require_process_mark() -> None:
    """Fail the running test unless it is marked as one that starts processes."""
    if _running and not _PROCESS_MARKS & {mark.name for mark in _running[-1].iter_markers()}:
        pytest.fail(
            f"{_running[-1].nodeid} starts a Python process but is not marked (expected one of "
            f"{', '.join(sorted(_PROCESS_MARKS))}). Mark it, or request the broker fixture."
        )


def _check_popen(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        executable = os.path.basename(os.fsdecode(arguments[0]))
        if executable.startswith(_PYTHON_PROGRAMS):
            require_process_mark()


sys.addaudithook(_check_popen)
