"""The generated part of ``docs/pages/results.md``: a table and a figure per claim."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
import matplotlib.pyplot as plt

from bench.results.claim import Claim, span

mpl.use("Agg")  # writes files, also without a display

BEGIN, END = "<!-- begin bench.results -->", "<!-- end bench.results -->"


def write_page(claims: Sequence[Claim], page: Path) -> None:
    """Replace the generated part of a page, and save a figure per claim in the folder of the page.

    Raises:
        ValueError: if the page has no generated part.
    """
    text = page.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: no generated part found. Add {BEGIN} and {END}.")
    parts = "\n\n".join(_section(claim) for claim in claims)
    page.write_text(f"{head}{BEGIN}\n\n{parts}\n\n{END}{tail}")
    for claim in (each for each in claims if each.curves):
        _draw(claim, page.parent / f"claim-{claim.name}.png")


def _section(claim: Claim) -> str:
    seeds = len(next(iter(claim.rows.values()))[0])
    spread = f"{seeds} seeds: mean (lowest–highest)." if seeds > 1 else "One seed."
    lines = [
        f"### {claim.name}: {claim.claim}",
        "",
        f"**{'Reproduced' if claim.reproduced else 'Not reproduced'}.** Falsified if "
        f"{claim.falsified_if}. {claim.note} {spread} "
        f"`python -m bench.results --only {claim.name[:2]} --seeds {seeds}`, "
        f"{claim.seconds:.0f} s of processor time.",
        "",
        f"| arm | {' | '.join(claim.columns)} |",
        f"|---|{'---|' * len(claim.columns)}",
    ]
    for arm, columns in claim.rows.items():
        lines.append(f"| {arm} | {' | '.join(map(span, columns))} |")
    figure = ["", f"![{claim.axes[1]}](claim-{claim.name}.png)"] if claim.curves else []
    return "\n".join([*lines, *figure])


def _draw(claim: Claim, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for number, (arm, curves) in enumerate(claim.curves.items()):
        colour = mpl.color_sequences["tab10"][number % 10]
        for curve in curves:
            axis.plot(*zip(*curve, strict=True), color=colour, linewidth=0.6, alpha=0.5)
        points = [zip(*seeds, strict=True) for seeds in zip(*curves, strict=True)]
        xs, means = zip(*((fmean(x), fmean(y)) for x, y in points), strict=True)
        axis.plot(xs, means, color=colour, linewidth=1.8, label=arm)
    axis.set(xlabel=claim.axes[0], ylabel=claim.axes[1], ylim=(-0.02, 1.02))
    if claim.axes[0] in ("K", "tokens of a completion"):
        axis.set_xscale("log")
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)
