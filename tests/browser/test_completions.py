"""Completions in Chromium: order, filters, spans, distributions, keys, and texts of any bytes."""

import random
from pathlib import Path
from typing import Any

import pytest

from mopd_trainer.pages.report import write_report
from tests.browser.conftest import OpenPage
from tests.trainer.pages.made_runs import completion, completions, journal, write_run

LINES = completions(24)


@pytest.fixture
def page(tmp_path: Path, open_page: OpenPage) -> Any:
    path = write_report(write_run(tmp_path / "run", journal(12), LINES))
    return open_page(path, "completions")


def mean(line: dict[str, Any]) -> float:
    """Return the mean loss of a line's compared tokens."""
    (values,) = line["nats"].values()
    compared = [value for value in values if value is not None]
    return sum(compared) / len(compared)


def listed(page: Any) -> list[str]:
    """Return the texts of the list."""
    return page.locator(".item .completion").all_text_contents()


def texts(lines: list[dict[str, Any]]) -> list[str]:
    return [line["completion"] for line in lines]


def test_order_and_filters(page: Any) -> None:
    worst = sorted(LINES, key=mean, reverse=True)
    assert listed(page) == texts(worst)
    page.get_by_label("Order").select_option("oldest")
    assert listed(page) == texts(LINES)
    page.get_by_label("Order").select_option("best")
    assert listed(page) == texts(worst[::-1])
    page.get_by_label("Teacher", exact=True).select_option("code")
    assert listed(page) == texts([line for line in worst[::-1] if "code" in line["teachers"]])
    assert "12 of 24 logged completions" in page.locator(".completions .hint").all_text_contents()
    page.get_by_label("Teacher", exact=True).select_option("")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("GAMMAbeta")
    chosen = [line for line in worst[::-1] if "gammabeta" in line["completion"]]
    assert listed(page) == texts(chosen) != []
    page.keyboard.type("x")
    assert page.get_by_text("No completion.").is_visible()


def test_completions_are_chosen_by_keys_and_by_pointer(page: Any) -> None:
    items = page.locator(".item")
    shown = page.locator(".message pre")
    for key, index in (("j", 1), ("j", 2), ("k", 1)):
        page.keyboard.press(key)
        assert items.nth(index).get_attribute("aria-selected") == "true"
        assert shown.text_content() == items.nth(index).locator(".snippet").first.text_content()
    items.nth(5).click()
    page.get_by_role("listbox").focus()
    page.keyboard.press("ArrowDown")
    assert items.nth(6).get_attribute("aria-selected") == "true"
    page.keyboard.press("End")
    assert items.last.get_attribute("aria-selected") == "true"
    assert page.locator("[aria-selected=true].item").count() == 1


def test_tokens_of_both_sides_are_in_spans_with_their_loss(page: Any) -> None:
    line = max(LINES, key=mean)
    spelled = [bytes.fromhex(piece).decode() for piece in line["tokens"]["bytes"]]
    chunks = page.locator(".chunk")
    rows = [chunk.locator(".row").all_text_contents() for chunk in chunks.all()]
    assert rows == [["".join(spelled[:2])] * 2, *([text, text] for text in spelled[2:])]
    kinds = chunks.evaluate_all("all => all.map(c => c.className.split(' ')[1])")
    assert kinds == ["span", *["one"] * 4]
    shades = page.locator(".token[data-side=student]").evaluate_all(
        "all => all.map(t => t.className.match(/ s(\\d)/)?.[1] ?? null)"
    )
    assert shades[0] is None
    assert [int(shade) for shade in shades[1:]] == sorted(int(shade) for shade in shades[1:])
    assert shades[-1] == "6"
    page.keyboard.press("a")
    assert chunks.count() == 0
    assert page.locator("pre.text .token").all_text_contents() == spelled
    page.keyboard.press("a")
    assert chunks.count() == 5


def bars(page: Any) -> list[list[tuple[str, str]]]:
    """Return token and probability of each list of likely tokens."""
    return [
        [
            (row.locator("code").text_content(), row.locator(".number").text_content())
            for row in each.locator("li").all()
        ]
        for each in page.locator(".inspector .bars").all()
    ]


def test_likely_tokens_of_both_models_are_under_the_pointer(page: Any) -> None:
    line = max(LINES, key=mean)
    spelled = [bytes.fromhex(piece).decode() for piece in line["tokens"]["bytes"]]
    page.locator(".token[data-side=student]").nth(1).hover()
    student = [(spelled[1], "90.5%"), ("<|end|>", "4.98%"), ("all others", "4.54%")]
    joined = [("".join(spelled[:2]), "81.9%"), ("␣other", "13.5%"), ("all others", "4.59%")]
    assert bars(page) == [student, joined]
    assert page.locator(".inspector .own code").all_text_contents() == [student[0][0], joined[0][0]]
    assert f"{line['nats'][next(iter(line['nats']))][1]:.3g} nats" in (
        page.locator(".inspector .facts").text_content()
    )
    page.locator(".token[data-side=teacher]").first.hover()
    assert [rows[0][0] for rows in bars(page)] == [*spelled[:2], "".join(spelled[:2])]
    page.locator(".aligned").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".token.current").get_attribute("data-index") in {"1", "2"}
    page.locator(".token[data-side=student]").nth(3).click()
    page.locator(".token[data-side=student]").nth(4).hover()  # the clicked token stays
    assert bars(page)[0][0][0] == spelled[3]


def test_several_teachers_are_switched(tmp_path: Path, open_page: OpenPage) -> None:
    line = completion([b"a", b"b", b"c"])
    other = completion([b"a", b"b", b"c"], teacher="code", nats=9.0)
    for key in ("teachers", "nats", "scores"):
        line[key] = {**line[key], **other[key]}
    del line["scores"]["code"]["top_ids"]
    path = write_report(write_run(tmp_path / "run", journal(2), [line, completion([b"old"])]))
    page = open_page(path, "completions")
    tabs = page.get_by_role("group", name="Teacher (t)").get_by_role("button")
    assert tabs.all_text_contents() == ["math", "code"]
    page.locator(".token").last.hover()
    assert len(bars(page)) == 2
    page.keyboard.press("t")
    assert page.locator(".tabs [aria-pressed=true]").text_content() == "code"
    page.locator(".token").last.hover()
    assert "logging.top_k" in page.locator(".inspector").text_content()
    assert "18 nats against code" in page.locator(".inspector").text_content()


def test_completions_of_earlier_versions_are_texts(tmp_path: Path, open_page: OpenPage) -> None:
    line = completion([b"4 <b>"])
    for key in ("tokens", "nats", "scores"):
        del line[key]
    page = open_page(write_report(write_run(tmp_path / "run", journal(1), [line])), "completions")
    assert page.locator("pre.text").text_content() == "4 <b>"
    assert page.locator(".item .facts .number").text_content() == "not compared"


def reference(tokens: list[bytes]) -> list[str]:
    """Return the characters that end in each token; bytes outside characters are escaped."""
    decoded = b"".join(tokens).decode(errors="surrogateescape")
    ends, end = [], 0
    for character in decoded:
        end += len(character.encode(errors="surrogateescape"))
        ends.append(end)
    result, start = [], 0
    for token in tokens:
        stop = start + len(token)
        inside = [c for c, e in zip(decoded, ends, strict=True) if start < e <= stop]
        escaped = (f"\\x{ord(c) - 0xDC00:02x}" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in inside)
        result.append("".join(escaped))
        start = stop
    return result


def test_texts_of_tokens_are_the_decoded_bytes(page: Any) -> None:
    chance = random.Random(0)
    pieces = ["a", "的", "é", "🙂", " ", "\t", "\u0301"]
    cases: list[list[bytes]] = [[b"\xe7\x9a", b"x"], [b"\xf0\x9f", b"\x99\x82"], [b"\xc0\x80", b""]]
    for _ in range(300):
        data = b"".join(
            chance.choice(pieces).encode() if chance.random() < 0.8 else chance.randbytes(1)
            for _ in range(12)
        )
        data = bytes(byte for byte in data if byte >= 0x20 or byte == 9).replace(b"\x7f", b"")
        cuts = sorted(chance.randrange(len(data) + 1) for _ in range(4))
        bounds = zip([0, *cuts], [*cuts, len(data)], strict=True)
        cases.append([data[start:end] for start, end in bounds])
    actual = page.evaluate(
        "cases => cases.map(tokenTexts)", [[piece.hex() for piece in case] for case in cases]
    )
    expected = [reference(case) for case in cases]
    # Invisible characters are escaped; cases with rare controls are skipped.
    for case, result, text in zip(cases, actual, expected, strict=True):
        if all(character.isprintable() or character == "\t" for character in "".join(text)):
            assert result == text, case
    assert page.evaluate("tokenTexts(['0a07', 'e280ae', 'e2808d', '7f'])") == [
        "↵\n\\x07",
        "\\u202e",
        "\\u200d",
        "\\x7f",
    ]
