"""Completions of ``completions.jsonl`` as HTML, each token coloured by what it cost.

Without scripts: which teacher's colours are seen is a choice of radio buttons, and style rules.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from mopd_trainer.reporting.colour_scale import SHADES, ColourScale, scale_style
from mopd_trainer.reporting.token_texts import token_texts

Line = Mapping[str, Any]

#: Of each of the steps that are shown.
_COMPLETIONS_A_STEP = 4


def completions_page(lines: Sequence[Line]) -> str:
    """Those of the first step that was written down, one in the middle, and the last."""
    steps = [
        (step, list(found)[:_COMPLETIONS_A_STEP])
        for step, found in groupby(lines, lambda line: line["step"])
    ]
    chosen = [steps[at] for at in sorted({0, len(steps) // 2, len(steps) - 1})] if steps else []
    shown = [line for _, found in chosen for line in found]
    names = list(dict.fromkeys(name for line in shown for name in _nats(line)))
    scales = {name: ColourScale.of(_values(shown, name)) for name in names}
    parts = ["<h2>Completions</h2>", *_legend(scales)]
    number = 0
    for step, found in chosen:
        parts.append(f"<h3>step {step:,}</h3><section>")
        for line in found:
            parts.append(_completion(line, scales, number))
            number += 1
        parts.append("</section>")
    return "".join(parts)


def completions_style(lines: Sequence[Line]) -> str:
    """CSS for ``completions_page`` of the same lines."""
    most = max((len(_nats(line)) for line in lines), default=0)
    rules = (
        f".tokens.k{at} .k{at}s{shade}, .k{at}:checked ~ .tokens .k{at}s{shade} "
        f"{{ background: var(--s{shade}); color: var(--t{shade}); }}"
        for at in range(most)
        for shade in range(SHADES)
    )
    return scale_style() + "\n".join(rules) + _STYLE


def _nats(line: Line) -> Mapping[str, Sequence[float | None]]:
    """By teacher; a run of an older version has none."""
    return line.get("nats", {})


def _values(lines: Iterable[Line], teacher: str) -> list[float | None]:
    return [value for line in lines for value in _nats(line).get(teacher, ())]


def _legend(scales: Mapping[str, ColourScale]) -> Iterable[str]:
    if scales:
        yield (
            "<p>A token's colour says how far the student was from the teacher there, before any "
            "weight; one without colour was not compared. Point at a token for its numbers.</p>"
        )
    for name, scale in scales.items():
        yield scale.legend(name)


def _completion(line: Line, scales: Mapping[str, ColourScale], number: int) -> str:
    judges = ", ".join(f"{name} {weight:g}" for name, weight in line["teachers"].items())
    told = f"{line['source']}, {line['finish_reason']}; {judges}"
    asked = "\n".join(f"{m['role']}: {m['content']}" for m in line["prompt"])
    return (
        f'<article><p>{escape(told)}</p><pre class="prompt">{escape(asked)}</pre>'
        f"{_answer(line, scales, number)}</article>"
    )


def _answer(line: Line, scales: Mapping[str, ColourScale], number: int) -> str:
    nats = _nats(line)
    if not nats:
        return f'<pre class="tokens">{escape(line["completion"])}</pre>'
    means = [f"{name} {_mean(values)}" for name, values in nats.items()]
    tokens = "".join(_tokens(line, [scales[name] for name in nats]))
    if len(nats) == 1:
        return f'<pre class="tokens k0">{tokens}</pre><p>{escape(means[0])}</p>'
    switch = "".join(
        f'<input type="radio" name="c{number}" id="c{number}k{at}" class="k{at}"'
        f'{"" if at else " checked"}><label for="c{number}k{at}">{escape(mean)}</label>'
        for at, mean in enumerate(means)
    )
    return f'{switch}<pre class="tokens">{tokens}</pre>'


def _mean(values: Sequence[float | None]) -> str:
    measured = [value for value in values if value is not None]
    if not measured:
        return "compared nothing"
    mean = sum(measured) / len(measured)
    return f"{mean:.3g} nats, mean of {len(measured):,} of {len(values):,} tokens"


def _tokens(line: Line, scales: Sequence[ColourScale]) -> Iterable[str]:
    nats, tokens = _nats(line), line["tokens"]
    spelled = [bytes.fromhex(each) for each in tokens["bytes"]]
    texts = token_texts(spelled)
    for at, (token_id, token, text) in enumerate(zip(tokens["ids"], spelled, texts, strict=True)):
        mark = tokens["marks"].get(str(at))
        values = [column[at] for column in nats.values()]
        shades = [
            f"k{which}s{scale.shade(value)}"
            for which, (scale, value) in enumerate(zip(scales, values, strict=True))
            if value is not None
        ]
        if mark is not None:
            shades.append("mark")
            text = mark
        elif not text and token:
            shades.append("part")  # of a character, which a later token shows
        numbers = [
            f"{name}: {'not compared' if value is None else f'{value:g} nats'}"
            for name, value in zip(nats, values, strict=True)
        ]
        title = "\n".join([f"id {token_id}", f"bytes {token.hex(' ') or 'none'}", *numbers])
        yield f'<span class="{" ".join(shades)}" title="{escape(title)}">{escape(text)}</span>'
    if tokens["count"] > len(texts):
        yield f"… and {tokens['count'] - len(texts):,} tokens more"


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
