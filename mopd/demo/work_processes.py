"""``run_in_processes``: pieces of work in separate processes, with a progress bar each."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from transformers.utils import logging as transformers_logging

#: (steps done, a note for the bar)
Report = Callable[[int, str], None]
_News = tuple[str, int, str]  # name of the work, steps done, note

_POLL_SECONDS = 0.2
#: Steps between two reports.
_REPORT_EVERY = 5


@dataclass(frozen=True)
class Work:
    """A call of a module's function: ``call(report, *arguments)``."""

    name: str
    steps: int
    call: Callable[..., None]
    arguments: tuple[Any, ...]


def run_in_processes(works: Sequence[Work], console: Console, processes: int) -> None:
    """Run each work in a separate process with one thread; models this small gain nothing from two.

    The first exception of a work is raised, and work that has not begun is cancelled.
    """
    spawn = multiprocessing.get_context("spawn")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with (
        spawn.Manager() as manager,
        ProcessPoolExecutor(processes, mp_context=spawn, max_tasks_per_child=1) as pool,
        Progress(*columns, console=console) as progress,
    ):
        news: Queue[_News] = manager.Queue()
        everything = progress.add_task("all", total=len(works), note="")
        running = [pool.submit(_run, work, news) for work in works]
        bars: dict[str, TaskID] = {}
        steps = {work.name: work.steps for work in works}
        try:
            done = 0
            while done < len(running):
                finished = [work for work in running if work.done()]
                for work in finished:
                    work.result()
                done = len(finished)
                progress.update(everything, completed=done)
                _show(progress, news, bars, steps)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run(work: Work, news: "Queue[_News]") -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # it would draw over these bars

    def report(done: int, note: str) -> None:
        if done % _REPORT_EVERY == 0 or done == work.steps:
            news.put((work.name, done, note))

    work.call(report, *work.arguments)


def _show(
    progress: Progress, news: "Queue[_News]", bars: dict[str, TaskID], steps: dict[str, int]
) -> None:
    """Show the next report; a finished work's bar becomes a line."""
    try:
        name, done, note = news.get(timeout=_POLL_SECONDS)
    except Empty:
        return
    if name not in bars:
        bars[name] = progress.add_task(name, total=steps[name], note="")
    progress.update(bars[name], completed=done, note=note)
    if done == steps[name]:
        progress.remove_task(bars.pop(name))
        progress.console.print(f"{name}: {done}/{done} steps  {note}", highlight=False)
