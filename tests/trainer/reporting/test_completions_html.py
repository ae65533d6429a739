"""Completions on the report's page: their tokens, by what they cost, and nothing but text."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from mopd_trainer.reporting.completions_html import completions_page, completions_style

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>'


class Page(HTMLParser):
    """What a browser would make of it: tags, attributes, and the text of every token."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.tokens: list[tuple[str, str, str]] = []  # classes, tooltip, text
        self._token: list[str] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.attributes += list(given)
        if "title" in given:
            self._token = [given.get("class") or "", given["title"] or "", ""]

    def handle_data(self, data: str) -> None:
        if self._token is not None:
            self._token[2] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "span" and self._token is not None:
            classes, title, text = self._token
            self.tokens.append((classes, title, text))
            self._token = None


def line(
    tokens: list[bytes], nats: dict[str, list[float | None]], step: int = 1, **changes: Any
) -> dict[str, Any]:
    """A line of ``completions.jsonl``."""
    return {
        "step": step,
        "prompt": [{"role": "user", "content": "2 + 2 ="}],
        "completion": b"".join(tokens).decode(errors="replace"),
        "source": "rollout",
        "finish_reason": "stop",
        "teachers": dict.fromkeys(nats, 1.0),
        "tokens": {
            "count": len(tokens),
            "ids": [100 + at for at in range(len(tokens))],
            "bytes": [token.hex() for token in tokens],
            "marks": {},
        },
        "nats": nats,
        **changes,
    }


def test_a_token_is_shown_with_its_shade_and_its_numbers() -> None:
    tokens = [b"4", b"\xe7\x9a", b"\x84", b" x", b""]
    given = line(tokens, {"math": [0.0, 0.25, None, 4.0, 1e-7]})
    given["tokens"]["marks"] = {"4": "end_of_turn"}
    page = Page(completions_page([given]))

    assert page.tokens == [
        ("k0s0", "id 100\nbytes 34\nmath: 0 nats", "4"),
        ("k0s1 part", "id 101\nbytes e7 9a\nmath: 0.25 nats", ""),
        ("", "id 102\nbytes 84\nmath: not compared", "的"),
        ("k0s6", "id 103\nbytes 20 78\nmath: 4 nats", " x"),
        ("k0s0 mark", "id 104\nbytes none\nmath: 1e-07 nats", "end_of_turn"),
    ]
    assert ".tokens.k0 .k0s6," in completions_style([given])
    assert "math 1.06 nats, mean of 4 of 5 tokens" in completions_page([given])


def test_several_teachers_have_a_switch_and_scales_of_their_own() -> None:
    lines = [
        line([b"a", b"b"], {"math": [0.0, 1.0], "code": [100.0, None]}),
        line([b"c"], {"code": [1.0]}),
    ]
    page = completions_page(lines)
    found = Page(page)

    assert [classes for classes, _, _ in found.tokens] == ["k0s0 k1s6", "k0s6", "k0s0"]
    assert found.tags.count("input") == 2
    assert re.findall(r'name="(\w+)" id="(\w+)" class="(\w+)"( checked)?', page) == [
        ("c0", "c0k0", "k0", " checked"),
        ("c0", "c0k1", "k1", ""),
    ]
    assert re.findall(r'<label for="(\w+)">(\w+)', page) == [("c0k0", "math"), ("c0k1", "code")]
    assert page.count('class="legend"') == 2
    assert ".k1:checked ~ .tokens .k1s6 {" in completions_style(lines)
    assert ".k2" not in completions_style(lines)


def test_the_first_a_middle_and_the_last_step_are_shown() -> None:
    lines = [
        line([b"%d" % step], {"math": [1.0]}, step)
        for step in (1, 25, 50, 75, 100)
        for _ in "abcdef"
    ]
    page = completions_page(lines)
    assert re.findall("<h3>(.*?)</h3>", page) == ["step 1", "step 50", "step 100"]
    assert page.count("<article>") == 3 * 4
    assert re.findall("<h3>(.*?)</h3>", completions_page(lines[:2])) == ["step 1"]
    assert Page(completions_page([])).tokens == []


def test_a_long_completion_is_cut() -> None:
    given = line([b"a"] * 3, {"math": [1.0] * 3})
    assert "more" not in completions_page([given])[-80:]
    given["tokens"]["count"] = 1203
    assert "</span>… and 1,200 tokens more</pre>" in completions_page([given])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_was_written_and_who_judged_it_is_text_and_never_markup(size: int) -> None:
    written = HOSTILE.encode()
    tokens = [written[at : at + size] for at in range(0, len(written), size)]
    given = line(
        tokens,
        {HOSTILE: [1.0] * len(tokens), "math": [None] * len(tokens)},
        prompt=[{"role": HOSTILE, "content": HOSTILE}],
        source=HOSTILE,
        finish_reason=HOSTILE,
    )
    given["tokens"]["marks"] = {"0": HOSTILE}
    page = Page(completions_page([given]))

    allowed = {"h2", "h3", "section", "p", "pre", "span", "article", "input", "label"}
    assert set(page.tags) <= allowed
    assert set(page.attributes) <= {"class", "title", "id", "for", "name", "type", "checked"}
    assert "".join(text for _, _, text in page.tokens[1:]) == written[size:].decode()
    assert page.tokens[0][2] == HOSTILE
    assert f"{HOSTILE}: 1 nats" in page.tokens[0][1]


def test_a_run_that_told_no_tokens_is_shown_as_text() -> None:
    given = line([b"4 <b>"], {})
    del given["tokens"], given["nats"]
    assert '<pre class="tokens">4 &lt;b&gt;</pre>' in completions_page([given])
    assert "nats a token" not in completions_page([given])
