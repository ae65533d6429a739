"""Primitives of the SVG drawings."""

from collections.abc import Sequence
from html import escape

INK = "#263238"


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 14,
    fill: str = INK,
    anchor: str = "middle",
    weight: str = "normal",
) -> str:
    """Return one line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, color: str, *, fill: str = "white") -> str:
    """Return a rounded rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
        f'fill="{fill}" stroke="{color}" stroke-width="1.5"/>'
    )


def line(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    color: str = INK,
    *,
    arrow: bool = False,
    dashed: bool = False,
    width: float = 1.5,
) -> str:
    """Return a straight line."""
    end = ' marker-end="url(#arrow)"' if arrow else ""
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
        f'stroke-width="{width:g}"{dash}{end}/>'
    )


def drawing(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return an SVG document with a white background, readable on dark pages."""
    arrow = (
        '<marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L10 5L0 10z" fill="#263238"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="system-ui, sans-serif"><title>{escape(title)}</title>',
            f"<defs>{arrow}</defs>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )
