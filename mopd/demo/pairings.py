"""The demo's list task with one loss after the other, and a table of what each taught.

    python -m mopd.demo.pairings --output-dir runs/pairings

Two teachers that can reverse lists of words, one with the student's tokenizer and one with another,
and a student that knows the form and not the answers. Every pairing begins with that student and
sees the same prompts; a run takes a fixed number of steps.
"""

import argparse
import asyncio
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from mopd.demo.recipes import STUDENT, WORDS_TEACHER, Recipe
from mopd.demo.run import EXERCISES, accuracy, distillation
from mopd.demo.services import teacher_services
from mopd.demo.tasks import draw_training
from mopd.demo.teachers import train_models
from mopd_protocol.runtime.atomic_file import replacing
from mopd_trainer.loop import train
from mopd_trainer.run_folder.journal import JOURNAL

#: A teacher of the student's own family, with its tokenizer.
OWN_TEACHER = replace(WORDS_TEACHER, name="own-teacher", family=STUDENT.family)
PROMPTS = 2_000
STEPS = 120
#: Steps at the end whose mean loss is told.
_LAST_STEPS = 10


@dataclass(frozen=True)
class Pairing:
    """Which teachers judge every completion, and with which loss each."""

    name: str
    losses: Mapping[str, Mapping[str, str]]  # ``own`` has the student's tokenizer, ``other`` not


PAIRINGS = (
    Pairing("same tokenizer", {"own": {"type": "topk_kl", "divergence": "reverse_kl"}}),
    Pairing("CTKD", {"other": {"type": "ctkd", "divergence": "reverse_kl"}}),
    Pairing("GOLD", {"other": {"type": "gold"}}),
    Pairing("prefix KL", {"other": {"type": "prefix_kl", "divergence": "reverse_kl"}}),
    Pairing(
        "two on one sample",
        {
            "own": {"type": "topk_kl", "divergence": "reverse_kl"},
            "other": {"type": "ctkd", "divergence": "reverse_kl"},
        },
    ),
)


@dataclass(frozen=True)
class Taught:
    """One line of the table."""

    pairing: str
    losses: str
    accuracy_before: float  # share of held-out exercises answered exactly
    accuracy_after: float
    loss: float  # nats per token, the mean of the last steps
    seconds: float  # of the run, without its models and without the exercises
    tokens: int  # that were trained


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains what is not cached, runs every pairing, prints the table, writes ``summary.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/pairings"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"a pairing (default: {STEPS})")
    parser.add_argument(
        "--exercises", type=int, default=EXERCISES, help=f"held out (default: {EXERCISES})"
    )
    parser.add_argument(
        "--model-steps", type=int, help="for each model, fewer than its own; to look around"
    )
    options = parser.parse_args(arguments)
    transformers_logging.disable_progress_bar()
    run_pairings(
        options.output_dir,
        seed=options.seed,
        steps=options.steps,
        exercises=options.exercises,
        model_steps=options.model_steps,
        console=Console(),
    )


def run_pairings(
    output_dir: Path,
    *,
    seed: int,
    steps: int,
    exercises: int,
    model_steps: int | None,
    console: Console,
) -> list[Taught]:
    """One run after the other; their lines of the table."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    recipes = {
        name: replace(recipe, seed=seed, steps=min(recipe.steps, model_steps or recipe.steps))
        for name, recipe in (("own", OWN_TEACHER), ("other", WORDS_TEACHER), ("student", STUDENT))
    }
    console.print("[bold]Two teachers of lists of words, and a student that knows their form")
    made = train_models(list(recipes.values()), output_dir / "models", console, processes=2)
    folders = {name: made[recipe.name] for name, recipe in recipes.items()}
    prompts = output_dir / "prompts.jsonl"
    before = accuracy(recipes["student"], folders["student"], "words", seed, exercises)
    console.print(f"models after {time.perf_counter() - began:.0f} s; the student has {before:.1%}")
    found: list[Taught] = []
    with teacher_services(
        {name: folders[name] for name in ("own", "other")}, output_dir / "logs"
    ) as addresses:
        for number, pairing in enumerate(PAIRINGS, start=1):
            console.print(f"[bold]{number}/{len(PAIRINGS)} {pairing.name}")
            _write_prompts(prompts, pairing, seed)
            teachers = {n: {"url": addresses[n], "loss": v} for n, v in pairing.losses.items()}
            folder = output_dir / "distillation" / pairing.name.replace(" ", "-").lower()
            found.append(
                _taught(
                    pairing,
                    folder,
                    {"prompts": prompts, "student": folders["student"], "teachers": teachers},
                    recipes["student"],
                    before=before,
                    steps=steps,
                    seed=seed,
                    exercises=exercises,
                    console=console,
                )
            )
    console.print(_table(found))
    seconds = time.perf_counter() - began
    with replacing(output_dir / "summary.json") as temporary:
        lines = [asdict(taught) for taught in found]
        report = {"seed": seed, "steps": steps, "exercises": exercises, "seconds": round(seconds)}
        temporary.write_text(json.dumps({**report, "pairings": lines}, indent=2) + "\n")
    console.print(f"seed {seed}, {steps} steps a pairing, {seconds:.0f} s; in {output_dir}")
    return found


def _taught(
    pairing: Pairing,
    folder: Path,
    parts: Mapping[str, Any],
    student: Recipe,
    *,
    before: float,
    steps: int,
    seed: int,
    exercises: int,
    console: Console,
) -> Taught:
    """A pairing's run, from its beginning to its exercises."""
    shutil.rmtree(folder, ignore_errors=True)
    config = distillation(folder, **parts, steps=steps, seed=seed)
    began = time.perf_counter()
    final = asyncio.run(train(config, console))
    seconds = time.perf_counter() - began
    lines = [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]
    last = [line["loss"] for line in lines[-_LAST_STEPS:]]
    return Taught(
        pairing=pairing.name,
        losses=", ".join(loss["type"] for loss in pairing.losses.values()),
        accuracy_before=before,
        accuracy_after=accuracy(student, final, "words", seed, exercises),
        loss=sum(last) / len(last),
        seconds=round(seconds, 1),
        tokens=round(sum(line["tokens/trained"] for line in lines)),
    )


def _write_prompts(path: Path, pairing: Pairing, seed: int) -> None:
    """The same lists for every pairing, without answers, with its teachers in equal shares."""
    random = Random(seed)
    routing = dict.fromkeys(pairing.losses, 1)
    exercises = (draw_training("words", random) for _ in range(PROMPTS))
    lines = (
        {"messages": [m.model_dump() for m in exercise.messages], "teacher": routing}
        for exercise in exercises
    )
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _table(found: Sequence[Taught]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("pairing")
    table.add_column("losses")
    for heading in ("before", "after", "nats/token", "seconds", "tokens"):
        table.add_column(heading, justify="right")
    for taught in found:
        table.add_row(
            taught.pairing,
            taught.losses,
            f"{taught.accuracy_before:.1%}",
            f"{taught.accuracy_after:.1%}",
            f"{taught.loss:.4f}",
            f"{taught.seconds:.0f}",
            f"{taught.tokens:,}",
        )
    return table


if __name__ == "__main__":
    main()
