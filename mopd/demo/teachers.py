"""Train the demo's models that are not cached, one process and one progress bar each."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from mopd.demo import work_processes
from mopd.demo.examples import Encoder
from mopd.demo.model_folder import is_cached, save_model
from mopd.demo.models import build_model
from mopd.demo.recipes import Recipe
from mopd.demo.training import training_losses
from mopd.demo.work_processes import Work, run_in_processes

#: (steps done, loss of the last one in nats per trained token)
Report = Callable[[int, float], None]


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
    """Train the missing models in parallel and return recipe name -> model folder."""
    folders = {recipe.name: root / recipe.name for recipe in recipes}
    works = [
        Work(recipe.name, recipe.steps, _train, (recipe, folders[recipe.name]))
        for recipe in recipes
        if not is_cached(recipe, folders[recipe.name])
    ]
    if works:
        run_in_processes(works, console, processes)
    return folders


def _train(report: work_processes.Report, recipe: Recipe, folder: Path) -> None:
    train_model(recipe, folder, lambda step, loss: report(step, f"loss {loss:.3f} nats"))
