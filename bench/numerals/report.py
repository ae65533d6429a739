"""Results of a comparison as JSON and tables: accuracy per teacher, and what was compared."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from bench.numerals.material import held_out_accuracy
from bench.numerals.pairs import CEILING, SFT, Pair

_MEASURED = ("invalid_byte_share", "compared_share", "loss")
#: Share of correct prompts whose first step the table shows.
_GOAL = 0.9
_TITLES = {
    SFT: "sft on references",
    CEILING: "ceiling (topk_kl)",
    "policy_gradient": "policy gradient",
    "policy_gradient_baseline": "policy gradient, baseline",
    "policy_gradient_proximal": "policy gradient, proximal",
    "policy_gradient_both": "policy gradient, both",
}


def comparison(
    results: Sequence[Mapping[str, Any]], pairs: Sequence[Pair], models: Path
) -> dict[str, Any]:
    """Return teachers' and students' accuracies by pair and loss, and every run."""
    return {
        "pairs": {
            pair.name: {
                "title": pair.title,
                "steps": pair.steps,
                "tasks": list(pair.tasks),
                "teachers": _teachers(pair.teachers, models)
                if _ran_with_teachers(results, pair)
                else {},
                "ceiling": _teachers(pair.ceiling, models) if _ran(results, pair, CEILING) else {},
                "losses": {
                    loss: _loss_figures(runs, pair)
                    for loss in pair.losses
                    if (runs := _ran(results, pair, loss))
                },
            }
            for pair in pairs
        },
        "runs": list(results),
    }


def table(figures: Mapping[str, Any], name: str) -> Table:
    """Return the table of one pair: teachers, the student before, then the losses, best first; a
    row for each task. It fits a terminal of 80 columns."""
    pair = figures["pairs"][name]
    tasks, losses = pair["tasks"], pair["losses"]
    first = next(iter(losses.values()), None)
    seeds = f", {first['seeds']} seeds" if first and first["seeds"] > 1 else ""
    shown = Table(
        title=f"\n{pair['title']}: {pair['steps']:,} steps{seeds}, % of held-out prompts",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    shown.add_column("", overflow="fold")
    shown.add_column("task", no_wrap=True)
    for heading in ("correct", "90 %\nat step", "invalid\nbytes", "compared", "loss"):
        shown.add_column(heading, justify="right", no_wrap=True)

    def add(label: str, correct: Sequence[str], *others: Sequence[str]) -> None:
        columns = ([label], tasks, correct, *others)
        for cells in zip_longest(*columns, fillvalue=""):
            shown.add_row(*cells)

    for kind in ("teachers", "ceiling"):
        if pair[kind]:
            sides = pair[kind].values()
            add(
                f"{kind} (sampled)",
                [f"{_percent(each['greedy'])} ({_percent(each['sampled'])})" for each in sides],
            )
    if first:
        add("student before", [_percent(first["before"][task]) for task in tasks])
    ranked = sorted(
        losses, key=lambda loss: -fmean(a["mean"] for a in losses[loss]["after"].values())
    )
    for loss in ranked:
        each = losses[loss]
        stopped = f", stopped at step {', '.join(map(str, each['stopped']))}"
        add(
            f"{_TITLES.get(loss, loss)}{stopped if each['stopped'] else ''}",
            [percentages(each["after"][task]) for task in tasks],
            [_steps(each["reached"][task]) for task in tasks],
            [f"{each['invalid_byte_share']:.2%}"],
            [f"{each['compared_share']:.1%}"],
            [f"{each['loss']:.3f}"],
        )
    return shown


def warnings(figures: Mapping[str, Any], name: str) -> list[str]:
    """Return a line for each loss of one pair that ``mopd train`` would warn about."""
    losses: Mapping[str, Any] = figures["pairs"][name]["losses"]
    return [
        f"{_TITLES.get(loss, loss)}: mopd train warns at step {_steps(each['warned'])}, "
        f"ends at {_steps(each['ended'])} (a step per seed)"
        for loss, each in losses.items()
        if any(each["warned"])
    ]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean, lowest and highest value, and their number."""
    return {
        "mean": fmean(values),
        "lowest": min(values),
        "highest": max(values),
        "seeds": len(values),
    }


def _ran(results: Sequence[Mapping[str, Any]], pair: Pair, loss: str) -> list[Mapping[str, Any]]:
    return [run for run in results if (run["pair"], run["loss"]) == (pair.name, loss)]


def _ran_with_teachers(results: Sequence[Mapping[str, Any]], pair: Pair) -> bool:
    """Return whether a run had the pair's teachers of another tokenizer."""
    return any(run["pair"] == pair.name and run["loss"] != CEILING for run in results)


def _teachers(sides: Mapping[str, Any], models: Path) -> dict[str, dict[str, float]]:
    return {name: held_out_accuracy(side, "teacher", 0, models) for name, side in sides.items()}


def _loss_figures(runs: Sequence[Mapping[str, Any]], pair: Pair) -> dict[str, Any]:
    """Return accuracies over the seeds, and what was compared in the last part of the runs."""
    ends = [run["curve"][-1] for run in runs]
    starts = [run["curve"][0]["accuracies"] for run in runs]
    return {
        "seeds": len(runs),
        "stopped": [end["step"] for run, end in zip(runs, ends, strict=True) if run.get("stopped")],
        "warned": [_first_finding(run, grave=False) for run in runs],
        "ended": [_first_finding(run, grave=True) for run in runs],
        "before": {task: fmean(start[task] for start in starts) for task in pair.tasks},
        "after": {task: spread([end["accuracies"][task] for end in ends]) for task in pair.tasks},
        "reached": {task: [_first_step(run["curve"], task) for run in runs] for task in pair.tasks},
        **{name: fmean(end.get(name, 0.0) for end in ends) for name in _MEASURED},
        "processor_seconds": fmean(run["processor_seconds"]["total"] for run in runs),
    }


def _first_step(curve: Sequence[Mapping[str, Any]], task: str) -> int | None:
    """Return the first evaluated step with ``_GOAL`` of the prompts correct."""
    return next((point["step"] for point in curve if point["accuracies"][task] >= _GOAL), None)


def _first_finding(run: Mapping[str, Any], *, grave: bool) -> int | None:
    """Return the step at which ``mopd train`` warns about the student, or ends the run."""
    steps = (each["step"] for each in run.get("findings", ()) if each["is_grave"] or not grave)
    return next(steps, None)


def _steps(reached: Sequence[int | None]) -> str:
    return "/".join("–" if step is None else str(step) for step in reached)


def percentages(figures: Mapping[str, float]) -> str:
    """Return a mean in percent, with lowest and highest if they differ."""
    mean, lowest, highest = (figures[key] for key in ("mean", "lowest", "highest"))
    if lowest == highest:
        return _percent(mean)
    return f"{_percent(mean)} ({100 * lowest:.0f}–{100 * highest:.0f})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
