"""Progress bar with an estimate of the remaining time, and one line per step."""

import math
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mopd_trainer.metrics.step_metrics import Metrics

#: Printed above the first step that has both numbers.
LEGEND = (
    "loss: what is trained, in nats per compared token; KL of samples: how much less likely the "
    "sampled text is under a teacher than under the student, in nats per token, an estimate of "
    "KL(student, teacher) that does not depend on the loss. The student learns as each falls; one "
    "is no part of the other."
)


class ProgressBar:
    """A progress bar that is shown within ``with``."""

    _progress: Progress

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()


class RunProgress(ProgressBar):
    """Progress bar over the steps of a run, at the bottom of a terminal."""

    def __init__(self, console: Console, *, name: str, done: int, total: int) -> None:
        self._console = console
        self._total = total
        self._has_legend = False
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(name, completed=done, total=total)

    def advance(self, step: int, metrics: Metrics, *, show: bool) -> None:
        """Show that a step (from 1) is finished."""
        self._progress.update(self._task, completed=step)
        if show:
            if not self._has_legend and _divergences(metrics):
                self._console.print(LEGEND, style="dim", highlight=False, soft_wrap=True)
                self._has_legend = True
            self._console.print(
                step_line(step, self._total, metrics), highlight=False, markup=False, soft_wrap=True
            )


def step_line(step: int, total: int, metrics: Metrics) -> str:
    """Return one line: nats per compared token, also by teacher (``sft`` for cross entropy), the
    estimated KL(student, teacher) in nats per token, the share of compared tokens, tokens, and
    seconds by phase."""
    dropped = metrics.get("dropped/total", 0.0)
    trained = _trained(metrics) if metrics["tokens/trained"] else ["step skipped: no samples"]
    parts = [
        f"step {step:>{len(str(total))}}/{total}",
        *trained,
        f"{metrics['tokens/trained']:.0f} tokens in {metrics['time/step']:.2f} s",
        f"sample {metrics['time/sample']:.2f}, wait for teachers {metrics['time/wait']:.2f}, "
        f"train {metrics['time/train']:.2f}",
    ]
    if metrics.get("time/remaining"):
        parts.append(f"{timedelta(seconds=round(metrics['time/remaining']))} left")
    if dropped:
        parts.append(f"{dropped:.0f} samples dropped")
    return "  ".join(parts)


def _trained(metrics: Metrics) -> list[str]:
    """Return rewards and losses, those that were measured."""
    losses = _by_teacher(metrics, ("/loss", "sft/loss_per_token"), decimals=4)
    parts: list[str] = []
    rewards = [f"{key[7:]} {each:.3f}" for key, each in metrics.items() if key[:7] == "reward/"]
    if rewards:
        parts.append(f"reward ({', '.join(rewards)})")
    if math.isfinite(metrics["loss"]) or not rewards:
        parts.append(f"loss {metrics['loss']:.4f} nats ({losses})")
    if divergences := _divergences(metrics):
        parts.append(f"KL of samples ({divergences})")
    if math.isfinite(metrics["compared_share"]) or not rewards:
        parts.append(f"{metrics['compared_share']:.0%} of tokens compared")
    return parts


def _divergences(metrics: Metrics) -> str:
    return _by_teacher(metrics, ("/reverse_kl_estimate",), decimals=2)


def _by_teacher(metrics: Metrics, endings: tuple[str, ...], *, decimals: int) -> str:
    """Return the measured values of each teacher."""
    return ", ".join(
        f"{key.removeprefix('teacher/').rpartition('/')[0]} {value:.{decimals}f}"
        for key, value in metrics.items()
        if key.endswith(endings) and math.isfinite(value)
    )
