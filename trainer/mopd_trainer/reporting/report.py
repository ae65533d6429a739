"""``report.html``: curves, timings, dropped samples and completions of a run on one page.

Generated from ``journal.jsonl``, ``completions.jsonl`` and ``config.yaml``, also during a run, and
readable without a network: no scripts, no libraries.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mopd_protocol.errors import ConfigError, DiskError
from mopd_protocol.runtime.atomic_file import replacing
from mopd_trainer.evaluation.metric_names import PREFIX
from mopd_trainer.reporting.completions_html import Line, completions_page, completions_style
from mopd_trainer.reporting.evaluation_text import evaluation_lines
from mopd_trainer.reporting.line_chart import COLOURS, Curve, line_chart
from mopd_trainer.run_folder.journal import COMPLETIONS, JOURNAL

REPORT = "report.html"
_LISTED = 4  # damaged lines

#: Title of a chart -> keys of the journal.
_RUN_CHARTS = {
    "loss, nats per compared token": ("loss", "sft/loss_per_token"),
    "share of tokens compared, share of bytes invalid": (
        "compared_share",
        "rollout/invalid_byte_share",
    ),
    "gradient norm": ("grad_norm",),
    "learning rate": ("learning_rate",),
    "completion tokens per step": ("tokens/trained",),
    "completions finished with EOS": ("rollout/finished_share",),
    "staleness, steps": ("staleness/mean", "staleness/max"),
    "seconds per step, by phase (phases may overlap)": (
        "time/step",
        "time/sample",
        "time/score",
        "time/wait",
        "time/train",
        "time/push",
    ),
}
#: Title of a chart -> last parts of an evaluation's key; one curve per set and part.
_EVALUATION_CHARTS = {
    "evaluation: accuracy": ("accuracy", "sampled_accuracy"),
    "evaluation: share of the gap to the teacher that is closed": ("gap_closed",),
    "evaluation: bits per byte of the reference answers": ("bits_per_byte",),
}
#: Title of a chart -> last part of a teacher's key; one curve per teacher.
_TEACHER_CHARTS = {
    "teachers: loss, nats per compared token": "loss",
    "teachers: share of tokens compared": "compared_share",
    "teachers: fraction of the step's tokens": "token_fraction",
    "teachers: alignment ratio (aligned bytes / bytes)": "alignment_ratio",
    "teachers: teacher top-k coverage": "teacher_mass_mean",
    "teachers: student mass on the teacher's top-k": "student_mass_mean",
    "teachers: seconds per response, 95th percentile": "score_seconds_p95",
}


def write_report(run: Path) -> Path:
    """Write ``report.html`` to a run folder, completely or not at all; return its path.

    Raises:
        ConfigError: if the folder has no journal.
        DiskError: if writing fails.
    """
    journal, journal_damage = _lines(run / JOURNAL)
    if not journal:
        raise ConfigError(
            f"{run}: no {JOURNAL} with a finished step found, expected the output_dir of a run",
            key=str(run),
        )
    completions, damage = _lines(run / COMPLETIONS)
    page = _page(run, journal, completions, _damage_note(journal_damage + damage))
    try:
        with replacing(run / REPORT) as unfinished:
            unfinished.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DiskError(
            f"{run / REPORT}: writing failed: {error.strerror or error}. Other files of the run "
            "are unchanged.",
            key=str(run / REPORT),
        ) from error
    return run / REPORT


def _lines(path: Path) -> tuple[list[Line], list[str]]:
    """Return valid lines, and ``file:line`` of damaged ones; an incomplete last line is ignored."""
    lines: list[Line] = []
    damaged: list[str] = []
    if path.is_file():
        # Not splitlines: a completion may contain line ends of text that are none of JSONL.
        complete = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        for number, text in enumerate(complete, 1):
            line = _line(text)
            if line is None:
                damaged.append(f"{path.name}:{number}")
            else:
                lines.append(line)
    return lines, damaged


def _line(text: str) -> Line | None:
    """Parse a line; None if it is damaged."""
    try:
        line: Any = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "step" in line else None


def _damage_note(damaged: Sequence[str]) -> str:
    if not damaged:
        return ""
    more = f" and {len(damaged) - _LISTED:,} more" if len(damaged) > _LISTED else ""
    return f"<p>Skipped damaged lines: {', '.join(damaged[:_LISTED])}{more}.</p>"


def _page(run: Path, journal: Sequence[Line], completions: Sequence[Line], damage: str) -> str:
    name = escape(run.name)
    keys = list({key: None for line in journal for key in line})
    config = run / "config.yaml"
    settings = escape(config.read_text(encoding="utf-8")) if config.is_file() else ""
    body = [
        f"<h1>{name}</h1><p>{len({line['step'] for line in journal} - {0}):,} steps, up to step "
        f"{journal[-1]['step']:,}.</p>",
        damage,
        "<section>",
        *_charts(journal, keys),
        "</section>",
        _evaluation_table(journal),
        _teachers_table(journal, keys),
        _dropped_table(journal, keys),
        completions_page(completions),
        f"<details><summary>config.yaml</summary><pre>{settings}</pre></details>",
    ]
    style = _STYLE + completions_style(completions)
    head = f'<meta charset="utf-8"><title>{name}</title><style>{style}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _charts(journal: Sequence[Line], keys: Sequence[str]) -> Iterable[str]:
    evaluations = [line for line in journal if any(key.startswith(PREFIX) for key in line)]
    for heading, parts in _EVALUATION_CHARTS.items():
        names = [
            key
            for key in keys
            for part in parts
            if re.fullmatch(rf"{PREFIX}[^/]+/{part}(/.+)?", key)
        ]
        curves = {name.removeprefix(PREFIX): _curve(evaluations, name) for name in names}
        yield _chart(heading, curves)
    for heading, names in _RUN_CHARTS.items():
        yield _chart(heading, {key: _curve(journal, key) for key in names if key in keys})
    for heading, last in _TEACHER_CHARTS.items():
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
    # A teacher's name may contain a slash; the metric after it does not.
    names = (key.removeprefix("teacher/") for key in keys if key.startswith("teacher/"))
    return [*dict.fromkeys(name.rsplit("/", 1)[0] for name in names)]


def _evaluation_table(journal: Sequence[Line]) -> str:
    """Return the last evaluation of each model: the student, and the teachers."""
    last: dict[str, tuple[int, str]] = {}
    for line in journal:
        for text in evaluation_lines(line):
            model, _, results = text.partition(": ")
            last[model] = (line["step"], results)
    rows = [[model, f"{step:,}", results] for model, (step, results) in last.items()]
    return _table("Evaluation", ("model", "after step", "results"), rows) if rows else ""


def _teachers_table(journal: Sequence[Line], keys: Sequence[str]) -> str:
    columns = ("tokens", "scored_tokens", "received_bytes", "retries", "failures", "fallbacks")
    rows = [
        [name, *(f"{_sum(journal, f'teacher/{name}/{column}'):,.0f}" for column in columns)]
        for name in _teachers(keys)
    ]
    return _table("Teachers, sums over all steps", ("teacher", *columns), rows)


def _dropped_table(journal: Sequence[Line], keys: Sequence[str]) -> str:
    reasons = [key for key in keys if key.startswith("dropped/")]
    rows = [
        [key.removeprefix("dropped/"), f"{total:,.0f}"]
        for key in reasons
        if (total := _sum(journal, key))
    ]
    return _table("Dropped samples", ("reason", "samples"), rows)


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
