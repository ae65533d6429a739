"""Completions of ``completions.jsonl`` as HTML, with tokens coloured by their loss.

Without scripts: radio buttons and style rules select the teacher whose losses are shown.
"""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby, pairwise
from math import isfinite
from typing import Any

import numpy as np

Line = Mapping[str, Any]

#: Completions shown of each step.
_COMPLETIONS_PER_STEP = 4
#: Background and text colours from small to large losses, on a light page.
LIGHT = (
    ("#fff6ed", "#1a1a1a"),
    ("#fee6ce", "#1a1a1a"),
    ("#fdcb9b", "#1a1a1a"),
    ("#fba762", "#1a1a1a"),
    ("#ee7f2f", "#000000"),
    ("#b94e06", "#ffffff"),
    ("#7a3003", "#ffffff"),
)
#: The same on a dark page.
DARK = (
    ("#2a1c12", "#f2f2f2"),
    ("#472a14", "#f2f2f2"),
    ("#693914", "#f2f2f2"),
    ("#8f4a10", "#ffffff"),
    ("#d27a2c", "#000000"),
    ("#f4a560", "#000000"),
    ("#ffd7ad", "#000000"),
)
SHADES = len(LIGHT)
#: Losses above this percentile have the last shade.
_TOP_PERCENTILE = 97
#: Bidirectional classes of characters that change the direction of text.
_DIRECTION = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


@dataclass(frozen=True)
class ColourScale:
    """Lower bounds, in nats, of all shades but the first; increasing.

    The bounds grow quadratically, because most tokens have a small loss.
    """

    bounds: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "ColourScale":
        """Return a scale for losses; missing and non-finite values are ignored."""
        finite = [value for value in values if value is not None and isfinite(value)]
        top = float(np.percentile(finite, _TOP_PERCENTILE)) if finite else 0.0
        top = top if top > 0 else 1.0
        bounds = (top * (shade / (SHADES - 1)) ** 2 for shade in range(1, SHADES))
        return cls(tuple(float(f"{bound:.2g}") for bound in bounds))

    def shade(self, nats: float) -> int:
        """Return the shade of a loss, from 0; negative losses have the first."""
        return sum(nats >= bound for bound in self.bounds)

    def legend(self, teacher: str) -> str:
        """Return the shades and their ranges as HTML."""
        ranges = [
            f"below {self.bounds[0]:g}",
            *(f"{low:g} to {high:g}" for low, high in pairwise(self.bounds)),
            f"{self.bounds[-1]:g} and above",
        ]
        swatches = (f'<span class="s{shade}">{text}</span>' for shade, text in enumerate(ranges))
        return f'<p class="legend">{escape(teacher)}, nats per token: {" ".join(swatches)}</p>'


def completions_page(lines: Sequence[Line]) -> str:
    """Return completions of the first, the middle and the last logged step."""
    steps = [
        (step, list(group)[:_COMPLETIONS_PER_STEP])
        for step, group in groupby(lines, lambda line: line["step"])
    ]
    chosen = [steps[i] for i in sorted({0, len(steps) // 2, len(steps) - 1})] if steps else []
    shown = [line for _, group in chosen for line in group]
    names = dict.fromkeys(name for line in shown for name in _nats(line))
    scales = {
        name: ColourScale.of(nats for line in shown for nats in _nats(line).get(name, ()))
        for name in names
    }
    parts = ["<h2>Completions</h2>"]
    if scales:
        parts.append(
            "<p>The colour of a token is the loss of the student against the teacher, before "
            "weighting; tokens without colour were not compared. Hover over a token for "
            "numbers.</p>"
        )
    parts += [scale.legend(name) for name, scale in scales.items()]
    number = 0
    for step, group in chosen:
        parts.append(f"<h3>step {step:,}</h3><section>")
        for line in group:
            parts.append(_article(line, scales, number))
            number += 1
        parts.append("</section>")
    return "".join(parts)


def completions_style(lines: Sequence[Line]) -> str:
    """Return CSS for ``completions_page`` of the same lines."""
    most = max((len(_nats(line)) for line in lines), default=0)
    rules = (
        f".tokens.k{k} .k{k}s{shade}, .k{k}:checked ~ .tokens .k{k}s{shade} "
        f"{{ background: var(--s{shade}); color: var(--t{shade}); }}"
        for k in range(most)
        for shade in range(SHADES)
    )
    return scale_style() + "\n".join(rules) + _STYLE


def scale_style() -> str:
    """Return CSS variables of the shades: ``--s0`` is a background, ``--t0`` its text colour."""

    def variables(shades: Iterable[tuple[str, str]]) -> str:
        return " ".join(
            f"--s{number}:{background};--t{number}:{text};"
            for number, (background, text) in enumerate(shades)
        )

    classes = "\n".join(
        f".s{shade} {{ background: var(--s{shade}); color: var(--t{shade}); }}"
        for shade in range(SHADES)
    )
    return (
        f":root {{ {variables(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}\n{classes}\n"
    )


def token_texts(tokens: Sequence[bytes]) -> list[str]:
    """Return one visible string per token; joined, the strings are the text.

    A character that spans several tokens belongs to the last of them. Bytes outside characters are
    ``\\xe7``, control and direction characters are escaped, and line ends have a visible mark.
    """
    characters = b"".join(tokens).decode("utf-8", "surrogateescape")
    lengths = (1 if _is_byte(character) else len(character.encode()) for character in characters)
    character_ends = [*accumulate(lengths)]
    texts: list[str] = []
    position = 0
    for start, end in pairwise([0, *accumulate(len(token) for token in tokens)]):
        first = position
        while position < len(characters) and start < character_ends[position] <= end:
            position += 1
        texts.append("".join(map(_visible, characters[first:position])))
    return texts


def _is_byte(character: str) -> bool:
    """Return True for a byte outside any character (``surrogateescape``)."""
    return 0xDC80 <= ord(character) <= 0xDCFF


def _visible(character: str) -> str:
    if character == "\n":
        return "↵\n"
    if _is_byte(character):
        return f"\\x{ord(character) - 0xDC00:02x}"
    control = unicodedata.category(character) == "Cc" and character != "\t"
    if control or unicodedata.bidirectional(character) in _DIRECTION:
        return character.encode("unicode_escape").decode()
    return character


def _nats(line: Line) -> Mapping[str, Sequence[float | None]]:
    """Return the losses by teacher; empty in runs of earlier versions."""
    return line.get("nats", {})


def _article(line: Line, scales: Mapping[str, ColourScale], number: int) -> str:
    teachers = ", ".join(f"{name} {weight:g}" for name, weight in line["teachers"].items())
    heading = f"{line['source']}, {line['finish_reason']}; {teachers}"
    prompt = "\n".join(f"{m['role']}: {m['content']}" for m in line["prompt"])
    return (
        f'<article><p>{escape(heading)}</p><pre class="prompt">{escape(prompt)}</pre>'
        f"{_completion(line, scales, number)}</article>"
    )


def _completion(line: Line, scales: Mapping[str, ColourScale], number: int) -> str:
    nats = _nats(line)
    if not nats:
        return f'<pre class="tokens">{escape(line["completion"])}</pre>'
    means = [f"{name} {_mean(values)}" for name, values in nats.items()]
    tokens = "".join(_tokens(line, [scales[name] for name in nats]))
    if len(nats) == 1:
        return f'<pre class="tokens k0">{tokens}</pre><p>{escape(means[0])}</p>'
    switch = "".join(
        f'<input type="radio" name="c{number}" id="c{number}k{k}" class="k{k}"'
        f'{"" if k else " checked"}><label for="c{number}k{k}">{escape(mean)}</label>'
        for k, mean in enumerate(means)
    )
    return f'{switch}<pre class="tokens">{tokens}</pre>'


def _mean(values: Sequence[float | None]) -> str:
    compared = [value for value in values if value is not None]
    if not compared:
        return "not compared"
    mean = sum(compared) / len(compared)
    return f"{mean:.3g} nats, mean of {len(compared):,} of {len(values):,} tokens"


def _tokens(line: Line, scales: Sequence[ColourScale]) -> Iterable[str]:
    nats, tokens = _nats(line), line["tokens"]
    pieces = [bytes.fromhex(piece) for piece in tokens["bytes"]]
    texts = token_texts(pieces)
    for index, (token_id, piece, text) in enumerate(zip(tokens["ids"], pieces, texts, strict=True)):
        mark = tokens["marks"].get(str(index))
        values = [column[index] for column in nats.values()]
        classes = [
            f"k{k}s{scale.shade(value)}"
            for k, (scale, value) in enumerate(zip(scales, values, strict=True))
            if value is not None
        ]
        if mark is not None:
            classes.append("mark")
            text = mark
        elif not text and piece:
            classes.append("part")  # of a character that a later token shows
        numbers = [
            f"{name}: {'not compared' if value is None else f'{value:g} nats'}"
            for name, value in zip(nats, values, strict=True)
        ]
        title = "\n".join([f"id {token_id}", f"bytes {piece.hex(' ') or 'none'}", *numbers])
        yield f'<span class="{" ".join(classes)}" title="{escape(title)}">{escape(text)}</span>'
    if tokens["count"] > len(texts):
        yield f"… and {tokens['count'] - len(texts):,} more tokens"


_STYLE = """
.legend { margin: .3rem 0; }
.legend span { padding: .1rem .5rem; white-space: nowrap; }
.prompt { color: #5c5c5c; }
.tokens { border-left: 3px solid #0072b2; padding-left: .6rem; line-height: 1.7; }
.tokens span { border-radius: 2px; margin-right: 1px; }
.tokens .part { padding: 0 .2em; }
.tokens .mark { font-size: .8em; font-style: italic; padding: 0 .3em; border: 1px solid #888a; }
article label { margin-right: 1.2em; }
@media (prefers-color-scheme: dark) { .prompt { color: #ababab; } }
@media print { .tokens span, .legend span { print-color-adjust: exact; } }
"""
