"""The oracle's findings as a table and as examples."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.numerals.distillation import Run
from bench.tasks.oracle import THRESHOLD, Push


def oracle_table(run: Run, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the oracle's figures of one run."""
    shown = Table(
        title=f"\n{run.loss} on {run.pair.title}: nats per token, and the shares of tokens that "
        "are pushed down, or ignored",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("task", "text", "logits"):
        shown.add_column(heading)
    for heading in ("tokens", "nats per token", "pushed down", "ignored"):
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(
            row["task"],
            row["text"],
            row["belief"],
            str(row["tokens"]),
            f"{row['nats_per_token']:.4f}",
            f"{row['pushed_down']:.1%}",
            f"{row['ignored']:.1%}",
        )
    return shown


def show_worst(console: Console, pushes: Sequence[Push], count: int) -> None:
    """Print one example of each kind of pushed position, then of ignored ones, worst first.

    A kind is a task, text and belief with two tokens and a target. The worst has the largest sum
    of excesses, or the most ignored positions.
    """
    kinds: dict[tuple[object, ...], list[Push]] = {}
    for push in pushes:
        if push.excess > THRESHOLD or push.ignored:
            tokens = push.student_tokens[max(0, push.position - 1) : push.position + 1]
            kind = (push.ignored, push.task, push.text, push.belief, tokens, push.target)
            kinds.setdefault(kind, []).append(push)
    for ignored in (False, True):
        groups = [group for kind, group in kinds.items() if kind[0] == ignored]
        groups.sort(key=lambda group: -sum(1.0 if p.ignored else p.excess for p in group))
        for group in groups[:count]:
            console.print(_example(group), markup=False, highlight=False, soft_wrap=True)


def _example(group: Sequence[Push]) -> str:
    push = max(group, key=lambda each: each.excess)
    marked = [
        f">>{token}<<" if position == push.position else token
        for position, token in enumerate(push.student_tokens)
    ]
    return (
        f"{'ignored' if push.ignored else 'pushed down'}, {len(group)} of this kind, {push.task}, "
        f"{push.text}, logits of {push.belief}: {push.prompt!r}\n"
        f"  student {'|'.join(marked)!r}\n  teacher {'|'.join(push.teacher_tokens)!r}\n"
        f"  target {push.target!r}: p {push.probability:.3f}, ceiling {push.ceiling:.3f}, "
        f"gradient {push.gradient:+.3f}, {push.nats:.3f} nats"
    )
