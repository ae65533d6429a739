"""All runs of a comparison: models first, then every loss and seed, each in a separate process.

A finished run is saved to a file, so that an interrupted comparison can be resumed.
"""

import json
import multiprocessing
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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

from bench.numerals.distillation import Run, distil
from bench.numerals.material import Role, model_folder, train_model
from bench.numerals.pairs import Side
from mopd_protocol import replacing

Result = dict[str, Any]
#: Name of the work, steps done, total steps, and a note.
_News = tuple[str, int, int, str]

_POLL_SECONDS = 0.2
#: Steps between two pieces of news.
_NEWS_EVERY = 5


@dataclass(frozen=True)
class Folders:
    """Folders of a comparison's models and results."""

    root: Path

    @property
    def models(self) -> Path:
        """Teachers and warm students, which later comparisons use again."""
        return self.root / "models"

    def result(self, run: Run) -> Path:
        """The file of a finished run."""
        return self.root / "results" / f"{run.name}.json"


def finished(run: Run, folders: Folders) -> Result | None:
    """Load the result of a run with exactly these settings, or return `None`."""
    path = folders.result(run)
    if not path.is_file():
        return None
    result: Result = json.loads(path.read_text())
    return result if result["settings"] == run.settings else None


def run_all(
    runs: Sequence[Run], folders: Folders, console: Console, processes: int
) -> list[Result]:
    """Run what is not finished; return the results in the order of ``runs``."""
    missing = [run for run in runs if finished(run, folders) is None]
    if missing:
        console.print(f"{len(runs) - len(missing)} of {len(runs)} runs are finished already")
        train_models(missing, folders, console, processes)
        with _workers(console, processes) as workers:
            workers.finish([workers.submit(run.name, _distil, run, folders) for run in missing])
    return [json.loads(folders.result(run).read_text()) for run in runs]


def train_models(runs: Sequence[Run], folders: Folders, console: Console, processes: int) -> None:
    """Train the teachers and warm students that the runs need and that are missing."""
    missing = _missing_models(runs, folders)
    if missing:
        with _workers(console, processes) as workers:
            workers.finish(
                [
                    workers.submit(folder.name, _train, model, folders)
                    for folder, model in missing.items()
                ]
            )


def _missing_models(runs: Sequence[Run], folders: Folders) -> dict[Path, tuple[Side, Role, int]]:
    """Return the models to train before the runs, by folder."""
    models = [model for run in runs for model in run.models]
    needed = {model_folder(*model, folders.models): model for model in models}
    return {folder: model for folder, model in needed.items() if not folder.is_dir()}


def _train(name: str, news: "Queue[_News]", model: tuple[Side, Role, int], at: Folders) -> None:
    _configure_process()
    train_model(*model, at.models, lambda done, steps: _report(news, name, done, steps, ""))


def _distil(name: str, news: "Queue[_News]", run: Run, at: Folders) -> None:
    _configure_process()
    steps = run.pair.steps
    result = distil(
        run,
        at.models,
        lambda done, loss, accuracy: _report(
            news, name, done, steps, f"loss {loss:.3f}  right {accuracy:.0%}"
        ),
    )
    with replacing(at.result(run)) as unfinished:
        unfinished.write_text(json.dumps(result, indent=1) + "\n")


def _configure_process() -> None:
    torch.set_num_threads(1)  # models this small gain nothing from more
    transformers_logging.disable_progress_bar()  # it would draw over the bars of the comparison


def _report(news: "Queue[_News]", name: str, done: int, steps: int, word: str) -> None:
    if done % _NEWS_EVERY == 0 or done == steps:
        news.put((name, done, steps, word))


class _Workers:
    """Single-task processes with progress bars."""

    def __init__(self, pool: ProcessPoolExecutor, news: "Queue[_News]", progress: Progress) -> None:
        self._pool = pool
        self._news = news
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def submit(
        self,
        name: str,
        work: Callable[..., None],
        *arguments: Any,
    ) -> Future[None]:
        """Run ``work(name, news, *arguments)`` in a separate process."""
        return self._pool.submit(work, name, self._news, *arguments)

    def finish(self, futures: Sequence[Future[None]]) -> None:
        """Wait for all, or for the first failure."""
        everything = self._progress.add_task("all", total=len(futures), word="")
        while True:
            done = [future for future in futures if future.done()]
            for future in done:
                future.result()
            self._progress.update(everything, completed=len(done))
            self._show_news()
            if len(done) == len(futures):
                self._progress.remove_task(everything)
                return

    def _show_news(self) -> None:
        try:
            name, done, steps, word = self._news.get(timeout=_POLL_SECONDS)
        except Empty:
            return
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=steps, word="")
        self._progress.update(self._bars[name], completed=done, word=word)
        if done == steps:
            self._progress.remove_task(self._bars.pop(name))
            self._progress.console.print(f"{name}: {steps} steps  {word}", highlight=False)


@contextmanager
def _workers(console: Console, processes: int) -> Generator[_Workers]:
    spawn = multiprocessing.get_context("spawn")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[word]}"),
        TimeElapsedColumn(),
    )
    with (
        spawn.Manager() as manager,
        ProcessPoolExecutor(processes, mp_context=spawn, max_tasks_per_child=1) as pool,
        Progress(*columns, console=console) as progress,
    ):
        news: Queue[_News] = manager.Queue()
        try:
            yield _Workers(pool, news, progress)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
