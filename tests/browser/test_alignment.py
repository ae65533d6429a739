"""The alignment explorer in Chromium, served and as a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mopd_trainer.inspection.explorer import Explorer
from mopd_trainer.inspection.tokenizers import load_tokenizer
from mopd_trainer.pages.alignment_page import alignment_server, write_alignment
from tests.browser.conftest import OpenPage
from tests.trainer.pages.test_watch import running
from tests.trainer.vocabularies import model_folder

TEXT = "Grüße 12345 + 7 =\n的 漢字"


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    folders = [model_folder(family) for family in ("qwen", "llama", "qwen")]
    return Explorer([load_tokenizer(str(folder)) for folder in folders])


@pytest.fixture
def page(explorer: Explorer, open_page: OpenPage) -> Iterator[Any]:
    with running(alignment_server(explorer, TEXT, host="127.0.0.1", port=0)) as server:
        yield open_page(server.url)


def rows(page: Any) -> list[list[str]]:
    """Return the tokens of each side in each part."""
    return [part.locator(".row").all_text_contents() for part in page.locator(".chunk").all()]


def test_parts_are_those_of_the_alignment(page: Any, explorer: Explorer) -> None:
    page.locator(".token").first.wait_for()
    kinds = page.locator(".chunk").evaluate_all("all => all.map(c => c.className.split(' ')[1])")
    expected: list[str] = []
    for part in explorer.align(TEXT)["pairs"][0]["chunks"]:
        expected += ["one"] * part if isinstance(part, int) else [("span", "none")[len(part) - 2]]
    assert kinds == expected
    for side in (0, 1):
        text = "".join(row[side] for row in rows(page))
        assert "␣12345␣+␣7␣=↵" in text
    page.keyboard.press("t")  # the third tokenizer is the first one
    assert all(row[0] == row[1] for row in rows(page))
    page.keyboard.press("t")
    assert all(len(row) == 3 for row in rows(page))
    assert all(row[0] == row[2] for row in rows(page))


def test_typed_text_is_aligned(page: Any) -> None:
    page.keyboard.press("/")
    page.get_by_label("Text").fill("7 + 5")
    page.locator(".token", has_text="漢").first.wait_for(state="detached")
    assert "".join(row[0] for row in rows(page)) == "7␣+␣5"
    page.get_by_role("button", name="Numbers").click()
    page.locator(".token", has_text="x").first.wait_for()
    page.get_by_label("Text").fill("")
    page.get_by_text("No text.").wait_for()


def test_error_of_the_server_is_shown(page: Any) -> None:
    response = """() => {
        window.fetch = async () => new Response('{"error": "text: bad"}', { status: 400 });
    }"""
    page.evaluate(response)
    page.get_by_label("Text").fill("1")
    page.get_by_text("text: bad").wait_for()


def test_projection_row_and_its_inverse(page: Any, explorer: Explorer) -> None:
    aligned = explorer.align(TEXT)
    token = aligned["tokens"][0]["ids"][0]
    ((target, weight), *_) = aligned["pairs"][0]["projection"]["rows"][str(token)]
    page.locator(".token[data-side=student]").first.hover()
    entry = page.locator(".inspector li").first
    assert entry.get_attribute("title") == f"id {target}"
    assert float(entry.locator(".number").text_content().rstrip("%")) == pytest.approx(
        100 * weight, abs=0.1
    )
    page.locator(".token[data-side=teacher]").first.hover()
    assert page.locator(".inspector li").first.get_attribute("title") == f"id {token}"
    page.keyboard.press("ArrowRight")
    assert page.locator(".token.current").get_attribute("data-index") == "0"
    page.keyboard.press("ArrowRight")
    assert page.locator(".token.current").get_attribute("data-index") == "1"


def test_equal_belief_check_colours_the_tokens(page: Any, explorer: Explorer) -> None:
    beliefs = {each["loss"]: each for each in explorer.beliefs(TEXT, 1)}
    for loss, belief in beliefs.items():
        row = page.locator(f"tr[data-loss={loss}]")
        row.wait_for()
        assert f"{belief['nats_per_token']:.4f}" in row.text_content()
    page.locator("tr[data-loss=gold] button").click()
    shades = page.locator(".token[data-side=student]").evaluate_all(
        "all => all.map(t => /(^| )s\\d/.test(t.className))"
    )
    assert shades == [value is not None for value in beliefs["gold"]["nats"]]
    page.keyboard.press("l")
    assert page.locator("tr button[aria-pressed=true]").text_content() == "alm"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_file_has_one_text_and_every_check(
    explorer: Explorer, tmp_path: Path, open_page: OpenPage, scheme: str
) -> None:
    path = write_alignment(explorer, TEXT, tmp_path / "page.html")
    page = open_page(path, color_scheme=scheme, viewport={"width": 340, "height": 700})
    assert page.get_by_label("Text").get_attribute("readonly") is not None
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate("document.documentElement.scrollWidth") <= 340
    assert page.locator("tr[data-loss]").count() >= 3
    page.keyboard.press("t")
    assert page.locator("tr[data-loss]").count() >= 3
    page.keyboard.press("?")
    assert page.get_by_role("dialog", name="Keys").is_visible()
