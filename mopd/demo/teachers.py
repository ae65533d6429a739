"""Train the demo's models that are not cached, one process and one progress bar each."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.managers import SyncManager
from pathlib import Path
from queue import Empty, Queue

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from transformers.utils import logging as transformers_logging

from mopd.demo.examples import Encoder
from mopd.demo.model_folder import is_cached, save_model
from mopd.demo.models import build_model
from mopd.demo.recipes import Recipe
from mopd.demo.training import training_losses

#: (steps done, loss of the last one in nats per trained token)
Report = Callable[[int, float], None]
_Progress = tuple[str, int, float]  # recipe name, steps done, loss

_POLL_SECONDS = 0.2


def train_model(recipe: Recipe, folder: Path, report: Report) -> None:
    """Train one model in this process and save it to ``folder``; no-op if cached."""
    if is_cached(recipe, folder):
        return
    tokenizer = recipe.tokenizer()
    model = build_model(recipe.family, tokenizer, recipe.seed)
    for step, loss in enumerate(training_losses(model, Encoder(tokenizer), recipe), start=1):
        report(step, loss)
    save_model(model, tokenizer, recipe, folder)


def train_models(
    recipes: Sequence[Recipe], root: Path, console: Console, processes: int
) -> dict[str, Path]:
    """Train the missing models in parallel and return recipe name -> model folder.

    Every process uses one thread: models of this size gain little from two.
    """
    folders = {recipe.name: root / recipe.name for recipe in recipes}
    missing = [recipe for recipe in recipes if not is_cached(recipe, folders[recipe.name])]
    if not missing:
        return folders
    spawn = multiprocessing.get_context("spawn")
    with (
        spawn.Manager() as manager,
        ProcessPoolExecutor(min(processes, len(missing)), mp_context=spawn) as pool,
        _progress(console) as progress,
    ):
        reports = _queue(manager)
        bars = {r.name: progress.add_task(r.name, total=r.steps, loss="") for r in missing}
        running = [pool.submit(_train_in_subprocess, r, folders[r.name], reports) for r in missing]
        _show(progress, bars, reports, running)
        for training in running:
            training.result()
    return folders


def _train_in_subprocess(recipe: Recipe, folder: Path, reports: "Queue[_Progress]") -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # would overwrite the demo's bars
    train_model(recipe, folder, lambda step, loss: reports.put((recipe.name, step, loss)))


def _queue(manager: SyncManager) -> "Queue[_Progress]":
    return manager.Queue()


def _show(
    progress: Progress,
    bars: dict[str, TaskID],
    reports: "Queue[_Progress]",
    running: Sequence[Future[None]],
) -> None:
    """Update the bars until every training has finished or failed."""
    while True:
        finished = all(training.done() for training in running)
        try:
            name, step, loss = reports.get(timeout=_POLL_SECONDS)
        except Empty:
            if finished:
                return
            continue
        progress.update(bars[name], completed=step, loss=f"loss {loss:.3f} nats")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
    )
