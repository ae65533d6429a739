"""``report.html``: a run's curves, timings, dropped samples and completions on one page.

Made from what the run has written (``journal.jsonl``, ``completions.jsonl``, ``config.yaml``), so
also of a run that is still going on, and readable without a network: no scripts, no libraries.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.runtime.atomic_file import replacing
from mopd_trainer.reporting.completions_html import Line, completions_page, completions_style
from mopd_trainer.reporting.line_chart import COLOURS, Curve, line_chart
from mopd_trainer.run_folder.journal import COMPLETIONS, JOURNAL

REPORT = "report.html"
_NAMED = 4  # damaged lines in one sentence

#: Heading -> the keys of the journal that are drawn together; those of teachers by their last part.
_OF_THE_RUN = {
    "loss, nats a token": ("loss", "sft/loss_per_token"),
    "gradient norm": ("grad_norm",),
    "learning rate": ("learning_rate",),
    "completion tokens a step": ("tokens/trained",),
    "share of completions that ended by themselves": ("rollout/finished_share",),
    "staleness, steps": ("staleness/mean", "staleness/max"),
    "seconds of a step, by phase (they may overlap)": (
        "time/step",
        "time/sample",
        "time/score",
        "time/wait",
        "time/train",
        "time/push",
    ),
}
_OF_TEACHERS = {
    "teachers: loss, nats a token": "loss_per_token",
    "teachers: share of the step's tokens": "token_fraction",
    "teachers: bytes in spans over bytes": "alignment_ratio",
    "teachers: mass that their top-k holds": "teacher_mass_mean",
    "teachers: the student's mass on it": "student_mass_mean",
    "teachers: seconds of an answer, 95th percentile": "score_seconds_p95",
}


def write_report(run: Path) -> Path:
    """Writes ``report.html`` into a run's folder, whole or not at all; its path.

    Raises:
        ConfigError: when the folder holds no journal of a run.
        DataError: when the page cannot be written.
    """
    journal, journal_damage = _lines(run / JOURNAL)
    if not journal:
        raise ConfigError(
            f"{run} holds no {JOURNAL} with a finished step; expected the output_dir of a run"
        )
    completions, damage = _lines(run / COMPLETIONS)
    page = _page(run, journal, completions, _told(journal_damage + damage))
    try:
        with replacing(run / REPORT) as unfinished:
            unfinished.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{run / REPORT} cannot be written: {error.strerror or error}; what the run has "
            "written is as it was"
        ) from error
    return run / REPORT


def _lines(path: Path) -> tuple[list[Line], list[str]]:
    """All whole lines, and where there are others; the last one may be under way."""
    found: list[Line] = []
    damaged: list[str] = []
    if path.is_file():
        # Not splitlines: a completion may hold what ends a line for text, and not for JSONL.
        whole = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        for number, text in enumerate(whole, 1):
            line = _line(text)
            if line is None:
                damaged.append(f"{path.name}:{number}")
            else:
                found.append(line)
    return found, damaged


def _line(text: str) -> Line | None:
    """What a line says; None where it is damaged."""
    try:
        line: Any = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "step" in line else None


def _told(damaged: Sequence[str]) -> str:
    if not damaged:
        return ""
    more = f" and {len(damaged) - _NAMED:,} more" if len(damaged) > _NAMED else ""
    return f"<p>Damaged and left out: {', '.join(damaged[:_NAMED])}{more}.</p>"


def _page(run: Path, journal: Sequence[Line], completions: Sequence[Line], damage: str) -> str:
    name = escape(run.name)
    keys = list({key: None for line in journal for key in line})
    config = run / "config.yaml"
    settings = escape(config.read_text(encoding="utf-8")) if config.is_file() else ""
    body = [
        f"<h1>{name}</h1><p>{len(journal):,} steps, the last one is {journal[-1]['step']:,}.</p>",
        damage,
        "<section>",
        *_charts(journal, keys),
        "</section>",
        _teachers_table(journal, keys),
        _dropped_table(journal, keys),
        completions_page(completions),
        f"<details><summary>config.yaml</summary><pre>{settings}</pre></details>",
    ]
    style = _STYLE + completions_style(completions)
    head = f'<meta charset="utf-8"><title>{name}</title><style>{style}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _charts(journal: Sequence[Line], keys: Sequence[str]) -> Iterable[str]:
    for heading, wanted in _OF_THE_RUN.items():
        yield _chart(heading, {key: _curve(journal, key) for key in wanted if key in keys})
    for heading, last in _OF_TEACHERS.items():
        curves = {name: _curve(journal, f"teacher/{name}/{last}") for name in _teachers(keys)}
        yield _chart(heading, curves)


def _chart(heading: str, curves: Mapping[str, Curve]) -> str:
    drawing = line_chart(curves)
    if not drawing:
        return ""
    legend = " ".join(
        f'<span style="color:{COLOURS[number % len(COLOURS)]}">{escape(name)}</span>'
        for number, name in enumerate(curves)
    )
    return f"<figure><figcaption>{heading}<br>{legend}</figcaption>{drawing}</figure>"


def _curve(journal: Sequence[Line], key: str) -> Curve:
    return [(line["step"], line.get(key)) for line in journal]


def _teachers(keys: Sequence[str]) -> list[str]:
    # A name may hold a slash; what is measured of it does not.
    names = (key.removeprefix("teacher/") for key in keys if key.startswith("teacher/"))
    return [*dict.fromkeys(name.rsplit("/", 1)[0] for name in names)]


def _teachers_table(journal: Sequence[Line], keys: Sequence[str]) -> str:
    columns = ("tokens", "scored_tokens", "received_bytes", "retries", "failures", "fallbacks")
    rows = [
        [name, *(f"{_sum(journal, f'teacher/{name}/{column}'):,.0f}" for column in columns)]
        for name in _teachers(keys)
    ]
    return _table("Teachers, over all steps", ("teacher", *columns), rows)


def _dropped_table(journal: Sequence[Line], keys: Sequence[str]) -> str:
    reasons = [key for key in keys if key.startswith("dropped/")]
    rows = [
        [key.removeprefix("dropped/"), f"{total:,.0f}"]
        for key in reasons
        if (total := _sum(journal, key))
    ]
    return _table("Samples that were not learnt from", ("reason", "samples"), rows)


def _sum(journal: Sequence[Line], key: str) -> float:
    return sum(line.get(key) or 0.0 for line in journal)


def _table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return f"<h2>{heading}</h2><p>None.</p>"
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<h2>{heading}</h2><table><tr>{head}</tr>{body}</table>"


_STYLE = """
:root { color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif; }
body { max-width: 1440px; margin: 2rem auto; padding: 0 1rem; }
section { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 1rem; }
figure, article { margin: 0; padding: .6rem .8rem; border: 1px solid #8884; border-radius: 6px; }
figcaption { min-height: 2.9em; }
figcaption span { margin-right: .8em; font-size: 12px; }
article { margin-bottom: .8rem; }
article p { margin: 0; opacity: .7; }
svg { width: 100%; }
svg line { stroke: #8883; }
svg text { fill: currentColor; font-size: 10px; opacity: .75; }
svg text.left { text-anchor: end; }
.curve { fill: none; stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round; }
table { border-collapse: collapse; }
td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8884; }
td:first-child, th:first-child { text-align: left; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0; }
"""
