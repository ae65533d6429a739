"""The documentation's pages, and the examples in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "pages"

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def examples(language: str, *pages: str) -> list[tuple[str, str]]:
    """Page and text of every fenced example in a language, of all pages where none is named."""
    files = [PAGES / page for page in pages] or sorted(PAGES.glob("*.md"))
    return [
        (file.name, text)
        for file in files
        for language_of_fence, text in _FENCE.findall(file.read_text())
        if language_of_fence == language
    ]


def code_spans(page: str) -> list[str]:
    """Return the inline code of a page, outside of fences."""
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", (PAGES / page).read_text()))
