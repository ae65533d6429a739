"""Completions on the report: tokens with colours and numbers, and never markup."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_trainer.reporting.completions_html import (
    DARK,
    LIGHT,
    SHADES,
    ColourScale,
    completions_page,
    completions_style,
    scale_style,
    token_texts,
)

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>'

losses = st.lists(st.floats(-10, 100, allow_subnormal=False), max_size=50)
plain = st.text(
    st.characters(
        exclude_categories=("Cc", "Cs"),
        exclude_characters="\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
    )
)


class Page(HTMLParser):
    """Tags, attributes and tokens of a page as a browser parses them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.tokens: list[tuple[str, str, str]] = []  # classes, tooltip, text
        self._token: list[str] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append(tag)
        self.attributes += list(attributes)
        if "title" in attributes:
            self._token = [attributes.get("class") or "", attributes["title"] or "", ""]

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
    """Return a line of ``completions.jsonl``."""
    return {
        "step": step,
        "prompt": [{"role": "user", "content": "2 + 2 ="}],
        "completion": b"".join(tokens).decode(errors="replace"),
        "source": "rollout",
        "finish_reason": "stop",
        "teachers": dict.fromkeys(nats, 1.0),
        "tokens": {
            "count": len(tokens),
            "ids": [100 + index for index in range(len(tokens))],
            "bytes": [token.hex() for token in tokens],
            "marks": {},
        },
        "nats": nats,
        **changes,
    }


def test_token_has_a_shade_and_numbers() -> None:
    tokens = [b"4", b"\xe7\x9a", b"\x84", b" x", b""]
    logged = line(tokens, {"math": [0.0, 0.25, None, 4.0, 1e-7]})
    logged["tokens"]["marks"] = {"4": "end_of_turn"}
    assert Page(completions_page([logged])).tokens == [
        ("k0s0", "id 100\nbytes 34\nmath: 0 nats", "4"),
        ("k0s1 part", "id 101\nbytes e7 9a\nmath: 0.25 nats", ""),
        ("", "id 102\nbytes 84\nmath: not compared", "的"),
        ("k0s6", "id 103\nbytes 20 78\nmath: 4 nats", " x"),
        ("k0s0 mark", "id 104\nbytes none\nmath: 1e-07 nats", "end_of_turn"),
    ]
    assert ".tokens.k0 .k0s6," in completions_style([logged])
    assert "math 1.06 nats, mean of 4 of 5 tokens" in completions_page([logged])


def test_several_teachers_have_a_switch_and_separate_scales() -> None:
    lines = [
        line([b"a", b"b"], {"math": [0.0, 1.0], "code": [100.0, None]}),
        line([b"c"], {"code": [1.0]}),
    ]
    html = completions_page(lines)
    page = Page(html)
    assert [classes for classes, _, _ in page.tokens] == ["k0s0 k1s6", "k0s6", "k0s0"]
    assert page.tags.count("input") == 2
    assert re.findall(r'name="(\w+)" id="(\w+)" class="(\w+)"( checked)?', html) == [
        ("c0", "c0k0", "k0", " checked"),
        ("c0", "c0k1", "k1", ""),
    ]
    assert re.findall(r'<label for="(\w+)">(\w+)', html) == [("c0k0", "math"), ("c0k1", "code")]
    assert html.count('class="legend"') == 2
    assert ".k1:checked ~ .tokens .k1s6 {" in completions_style(lines)
    assert ".k2" not in completions_style(lines)


def test_first_middle_and_last_step_are_shown() -> None:
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


def test_number_of_unlisted_tokens_is_shown() -> None:
    logged = line([b"a"] * 3, {"math": [1.0] * 3})
    assert "more" not in completions_page([logged])[-80:]
    logged["tokens"]["count"] = 1203
    assert "1,200" in completions_page([logged])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_logged_text_is_never_markup(size: int) -> None:
    text = HOSTILE.encode()
    tokens = [text[start : start + size] for start in range(0, len(text), size)]
    logged = line(
        tokens,
        {HOSTILE: [1.0] * len(tokens), "math": [None] * len(tokens)},
        prompt=[{"role": HOSTILE, "content": HOSTILE}],
        source=HOSTILE,
        finish_reason=HOSTILE,
    )
    logged["tokens"]["marks"] = {"0": HOSTILE}
    page = Page(completions_page([logged]))
    allowed = {"h2", "h3", "section", "p", "pre", "span", "article", "input", "label"}
    assert set(page.tags) <= allowed
    assert set(page.attributes) <= {"class", "title", "id", "for", "name", "type", "checked"}
    assert "".join(text for _, _, text in page.tokens[1:]) == text[size:].decode()
    assert page.tokens[0][2] == HOSTILE
    assert f"{HOSTILE}: 1 nats" in page.tokens[0][1]


def test_completion_without_tokens_is_shown_as_text() -> None:
    logged = line([b"4 <b>"], {})
    del logged["tokens"], logged["nats"]
    page = completions_page([logged])
    assert '<pre class="tokens">4 &lt;b&gt;</pre>' in page
    assert 'class="legend"' not in page


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.2."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("shades", "sign"), [(LIGHT, -1), (DARK, 1)])
def test_shades_are_ordered_and_have_contrast(
    shades: tuple[tuple[str, str], ...], sign: int
) -> None:
    for background, text in shades:
        low, high = sorted([luminance(background), luminance(text)])
        assert (high + 0.05) / (low + 0.05) >= 4.5, (background, text)
    values = [sign * luminance(background) for background, _ in shades]
    assert values == sorted(set(values))
    assert len(shades) == SHADES


@given(losses, losses)
def test_shade_grows_with_the_loss(scaled: list[float], values: list[float]) -> None:
    scale = ColourScale.of(scaled)
    assert list(scale.bounds) == sorted(scale.bounds)
    shades = [scale.shade(nats) for nats in sorted(values)]
    assert shades == sorted(shades)
    assert all(0 <= shade < SHADES for shade in shades)
    for index, bound in enumerate(scale.bounds):
        assert scale.shade(bound) > index


def test_last_shade_begins_at_the_97th_percentile() -> None:
    scale = ColourScale.of([None, float("nan"), *(value / 100 for value in range(101))])
    assert scale.bounds[-1] == pytest.approx(0.97)
    assert scale.shade(0.0) == scale.shade(-3.0) == 0
    assert ColourScale.of([]).bounds[-1] == 1.0


def test_legend_has_every_bound() -> None:
    legend = ColourScale((0.1, 0.2, 0.3, 0.4, 0.5, 2.0)).legend("a<b")
    assert "a&lt;b, nats per token" in legend
    ranges = re.findall(r'<span class="s(\d)">([^<]*)</span>', legend)
    assert [int(shade) for shade, _ in ranges] == [*range(SHADES)]
    assert [re.findall(r"[\d.]+", text) for _, text in ranges] == [
        ["0.1"],
        *([str(low), str(high)] for low, high in ((0.1, 0.2), (0.2, 0.3), (0.3, 0.4), (0.4, 0.5))),
        ["0.5", "2"],
        ["2"],
    ]
    for shade in range(SHADES):
        assert f".s{shade} {{ background: var(--s{shade}); color: var(--t{shade}); }}" in (
            scale_style()
        )


def split(data: bytes, positions: list[int]) -> list[bytes]:
    bounds = sorted(min(position, len(data)) for position in positions)
    return [data[a:b] for a, b in zip([0, *bounds], [*bounds, len(data)], strict=True)]


@given(plain, st.lists(st.integers(0, 40)))
def test_character_belongs_to_its_last_token(text: str, positions: list[int]) -> None:
    tokens = split(text.encode(), positions)
    expected: list[str] = []
    for index in range(len(tokens)):
        prefix, longer = (
            b"".join(tokens[:end]).decode(errors="ignore") for end in (index, index + 1)
        )
        expected.append(longer.removeprefix(prefix))
    assert token_texts(tokens) == expected
    assert "".join(token_texts(tokens)) == text


@given(st.binary(), st.lists(st.integers(0, 40)))
def test_text_does_not_depend_on_token_boundaries(data: bytes, positions: list[int]) -> None:
    tokens = split(data, positions)
    assert len(token_texts(tokens)) == len(tokens)
    assert "".join(token_texts(tokens)) == "".join(token_texts([data]))


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        ([b"a", b"\xe7", b"\x9a", b"\x84b"], ["a", "", "", "的b"]),
        ([b"\xe7\x9a", b"x"], ["\\xe7\\x9a", "x"]),
        ([b"\xff", b""], ["\\xff", ""]),
        ([b"a\n", b"\t\r\x00\x1b"], ["a↵\n", "\t\\r\\x00\\x1b"]),
        (["\u202e".encode(), "\u2066x".encode()], ["\\u202e", "\\u2066x"]),
        ([b"\xed\xa0", b"\x80"], ["\\xed\\xa0", "\\x80"]),
        ([], []),
    ],
)
def test_invisible_characters_are_escaped(tokens: list[bytes], texts: list[str]) -> None:
    assert token_texts(tokens) == texts
