"""Compare pairings of teachers and losses on the demo's word lists.

    python -m bench.pairings --output-dir runs/pairings

Two teachers reverse word lists, one with the student's tokenizer and one with another; the student
was trained on the form only. Every pairing starts from this student and has the same prompts.
"""

import argparse
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from mopd.demo.recipes import STUDENT, WORDS_TEACHER
from mopd.demo.run import (
    EXERCISES,
    accuracies,
    distillation,
    read_journal,
    result_table,
    write_held_out,
    write_json,
    write_prompts,
)
from mopd.demo.services import teacher_services
from mopd.demo.tasks import draw_training, held_out_exercises
from mopd.demo.teachers import train_models
from mopd_trainer import train

#: A teacher of the student's family, with the student's tokenizer.
OWN_TEACHER = replace(WORDS_TEACHER, name="own-teacher", family=STUDENT.family)
PROMPTS = 2_000
STEPS = 120
#: The reported loss is the mean of this many steps at the end.
_LAST_STEPS = 10


@dataclass(frozen=True)
class Pairing:
    """Teachers that score every completion, each with a loss."""

    name: str
    losses: Mapping[str, Mapping[str, str]]  # ``own`` has the student's tokenizer


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
class PairingResult:
    """One row of the table."""

    pairing: str
    losses: str
    accuracy_before: float  # exact match on held-out exercises
    accuracy_after: float
    loss: float  # nats per token, the mean of the last steps
    seconds: float  # of the distillation only
    tokens: int  # trained


def main(arguments: Sequence[str] | None = None) -> None:
    """Train missing models, run every pairing, print the table and save ``summary.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/pairings"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"per pairing (default: {STEPS})")
    parser.add_argument(
        "--exercises", type=int, default=EXERCISES, help=f"held out (default: {EXERCISES})"
    )
    parser.add_argument(
        "--model-steps", type=int, help="upper bound on the training steps of each model"
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
) -> list[PairingResult]:
    """Run the pairings one after the other and return the rows of the table."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    recipes = {
        name: replace(recipe, seed=seed, steps=min(recipe.steps, model_steps or recipe.steps))
        for name, recipe in (("own", OWN_TEACHER), ("other", WORDS_TEACHER), ("student", STUDENT))
    }
    console.print(
        "[bold]Two teachers of word lists, and a student that was trained on the form only"
    )
    trained = train_models(list(recipes.values()), output_dir / "models", console, processes=2)
    folders = {name: trained[recipe.name] for name, recipe in recipes.items()}
    prompts = output_dir / "prompts.jsonl"
    console.print(f"models: {time.perf_counter() - started:.0f} s")
    held_out = write_held_out(
        output_dir / "held-out.jsonl", held_out_exercises("words", exercises, seed)
    )
    evaluation = {"every": steps, "sets": {"words": held_out | {"samples": 0}}}
    results: list[PairingResult] = []
    with teacher_services(
        {name: folders[name] for name in ("own", "other")}, output_dir / "logs"
    ) as addresses:
        for number, pairing in enumerate(PAIRINGS, start=1):
            console.print(f"[bold]{number}/{len(PAIRINGS)} {pairing.name}")
            random = Random(seed)
            routing = dict.fromkeys(pairing.losses, 1.0)
            write_prompts(
                prompts, ((draw_training("words", random), routing) for _ in range(PROMPTS))
            )
            teachers = {n: {"url": addresses[n], "loss": v} for n, v in pairing.losses.items()}
            folder = output_dir / "distillation" / pairing.name.replace(" ", "-").lower()
            results.append(
                _run(
                    pairing,
                    folder,
                    {
                        "prompts": prompts,
                        "student": folders["student"],
                        "teachers": teachers,
                        "evaluation": evaluation,
                    },
                    steps=steps,
                    seed=seed,
                )
            )
    console.print(_table(results))
    seconds = time.perf_counter() - started
    settings = {"seed": seed, "steps": steps, "exercises": exercises, "seconds": round(seconds)}
    write_json(output_dir / "summary.json", {**settings, "pairings": list(map(asdict, results))})
    console.print(
        f"seed {seed}, {steps} steps per pairing, {seconds:.0f} s; results in {output_dir}"
    )
    return results


def _run(
    pairing: Pairing,
    folder: Path,
    parts: Mapping[str, Any],
    *,
    steps: int,
    seed: int,
) -> PairingResult:
    """Distil one pairing and measure the student."""
    shutil.rmtree(folder, ignore_errors=True)
    config = distillation(folder, **parts, steps=steps, seed=seed)
    started = time.perf_counter()
    train(config)
    seconds = time.perf_counter() - started
    before, *journal = read_journal(folder)
    losses = [step["loss"] for step in journal[-_LAST_STEPS:]]
    accuracy = accuracies([before, *journal], "words")
    return PairingResult(
        pairing=pairing.name,
        losses=", ".join(loss["type"] for loss in pairing.losses.values()),
        accuracy_before=accuracy[0],
        accuracy_after=accuracy[steps],
        loss=sum(losses) / len(losses),
        seconds=round(seconds, 1),
        tokens=round(sum(step["tokens/trained"] for step in journal)),
    )


def _table(results: Sequence[PairingResult]) -> Table:
    headings = ("before", "after", "nats/token", "seconds", "tokens")
    table = result_table("pairing", "losses", *headings)
    for result in results:
        table.add_row(
            result.pairing,
            result.losses,
            f"{result.accuracy_before:.1%}",
            f"{result.accuracy_after:.1%}",
            f"{result.loss:.4f}",
            f"{result.seconds:.0f}",
            f"{result.tokens:,}",
        )
    return table


if __name__ == "__main__":
    main()
