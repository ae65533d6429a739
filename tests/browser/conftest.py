"""Chromium for a session of tests. A page fails its test by an error, or a request to elsewhere."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

#: Chromium itself sends requests without these.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")

#: (address, options of the context) -> an open page.
OpenPage = Callable[..., Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    assert program is not None, "Chromium not found. Run make test-browser, or install it."
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[OpenPage]:
    """Return a function that opens a page; each has a new context."""
    contexts: list[Any] = []
    problems: list[str] = []

    def open_page(address: str | Path, tab: str = "", **options: Any) -> Any:
        url = address.as_uri() if isinstance(address, Path) else address
        options = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"} | options
        context = chromium.new_context(**options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda message: message.type == "error" and problems.append(message.text),
        )
        served = {urlsplit(url).netloc, ""}
        page.on(
            "request",
            lambda sent: urlsplit(sent.url).netloc in served or problems.append(sent.url),
        )
        page.goto(f"{url}{tab and '#'}{tab}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems
