"""``RowProgress``: rows done, rows per second, and an estimate of the remaining time."""

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from mopd_trainer.reporting.progress import ProgressBar

#: Between two lines without a terminal.
_SECONDS = 10.0


class RowProgress(ProgressBar):
    """A progress bar; without a terminal, a line every ten seconds."""

    def __init__(self, console: Console, *, total: int) -> None:
        self._console = console
        self._total = total
        self._started = self._shown = time.monotonic()
        self._first: int | None = None  # rows that were done at the start
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rows"),
            _RowsPerSecond(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("rows", total=total)

    def update(self, rows: int) -> None:
        """Show that this many rows are done."""
        self._progress.update(self._task, completed=rows)
        now = time.monotonic()
        if self._first is None:
            self._first, self._started = rows, now
        elif not self._console.is_terminal and now - self._shown >= _SECONDS:
            self._shown = now
            speed = (rows - self._first) / (now - self._started)
            left = timedelta(seconds=round((self._total - rows) / speed)) if speed else "unknown"
            self._console.print(
                f"{rows:,} of {self._total:,} rows, {speed:,.1f} rows/s, {left} left",
                highlight=False,
                soft_wrap=True,
            )


class _RowsPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        """See ``ProgressColumn``."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.1f} rows/s")
