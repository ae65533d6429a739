"""``document``: one HTML file with its styles, scripts and data, which loads nothing else."""

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

_ASSETS = files("mopd_trainer.pages") / "assets"
_STYLES = ("uPlot.min.css", "page.css")
_SHARED_SCRIPTS = ("elements.js", "tokens.js")
#: Kind of page -> its scripts, after the shared ones.
_SCRIPTS = {
    "run": (
        "uPlot.iife.min.js",
        *("runs.js", "charts.js", "curves.js", "completions.js", "teachers.js", "run_page.js"),
    ),
    "alignment": ("alignment_page.js",),
}


def document(kind: str, title: str, data: Any, *, served: bool = False) -> str:
    """Return a page.

    Its security policy allows the embedded scripts and styles by their hashes, and nothing else;
    a served page may also request its own server.

    Args:
        kind: ``run`` or ``alignment``.
        data: JSON values, which the scripts read from the element ``data``.
        served: by a ``PageServer``.
    """
    styles = [_asset(name) for name in _STYLES]
    scripts = [_asset(name) for name in (*_SHARED_SCRIPTS, *_SCRIPTS[kind])]
    policy = _policy(styles, scripts, connect="'self'" if served else "'none'")
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta name="referrer" content="no-referrer">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>",
        *(f"<style>{style}</style>" for style in styles),
    ]
    body = [
        '<div id="page"></div>',
        "<noscript>This page needs JavaScript.</noscript>",
        f'<script type="application/json" id="data">{_embedded(data)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head>{"".join(head)}</head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _embedded(data: Any) -> str:
    """Return JSON that cannot end its script element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _policy(styles: Sequence[str], scripts: Sequence[str], *, connect: str) -> str:
    def hashes(texts: Sequence[str]) -> str:
        digests = (b64encode(sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes(scripts)}; style-src {hashes(styles)}; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
