"""``mopd demo``: train two teachers, distil a student from both, and print a table."""

import json
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from mopd.demo.accuracy import exact_match
from mopd.demo.examples import Encoder
from mopd.demo.recipes import RECIPES, Recipe
from mopd.demo.services import teacher_services
from mopd.demo.tasks import TASKS, Exercise, TaskName, draw_training, held_out_exercises
from mopd.demo.teachers import train_models
from mopd_losses import described
from mopd_protocol import replacing
from mopd_trainer import RunConfig, train

#: Held-out exercises per task. A share of 200 has a standard error of at most 3.5 points.
EXERCISES = 200
#: Training prompts, without completions; sums are the harder task.
PROMPTS: Mapping[TaskName, int] = {"sums": 6_000, "words": 2_000}
#: Sums improve after 200 to 400 steps, by seed and processor: after 500 steps one seed had reached
#: 46 % and another 94 %.
STEPS = 800
#: One direction of the KL per teacher.
DIVERGENCES = {"sums": "forward_kl", "words": "reverse_kl"}


@dataclass(frozen=True)
class TaskResult:
    """One row of the table: shares of held-out exercises with an exact match."""

    loss: str
    teacher_accuracy: float
    student_before: float
    student_after: float
    scored_tokens_per_second: float
    """Teacher tokens divided by the seconds of scoring requests."""


def run_demo(output_dir: Path, *, seed: int, steps: int | None, console: Console) -> None:
    """Train missing models, serve, distil, print the table and save ``summary.json``."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    recipes = [replace(recipe, seed=seed) for recipe in RECIPES]
    sums, words, student = recipes
    console.print("[bold]1. Two tiny teachers, and a student that was trained on the form only")
    folders = train_models(recipes, output_dir / "models", console, processes=2)
    models_done = time.perf_counter()
    console.print("[bold]2. Distillation: the student samples, both teachers score over HTTP")
    run_folder = output_dir / "distillation"
    shutil.rmtree(run_folder, ignore_errors=True)
    prompts = output_dir / "prompts.jsonl"
    random = Random(seed)
    write_prompts(
        prompts,
        ((draw_training(task, random), task) for task in TASKS for _ in range(PROMPTS[task])),
    )
    teachers = {"sums": folders[sums.name], "words": folders[words.name]}
    with teacher_services(teachers, output_dir / "logs") as addresses:
        config = distillation(
            run_folder,
            prompts=prompts,
            student=folders[student.name],
            teachers={
                name: {"url": url, "loss": {"type": "ctkd", "divergence": DIVERGENCES[name]}}
                for name, url in addresses.items()
            },
            steps=steps or STEPS,
            seed=seed,
        )
        final = train(config)
    distilled = time.perf_counter()
    console.print(f"[bold]3. Exact match on {EXERCISES} held-out exercises per task, greedy")
    rates = _scoring_rates(read_journal(run_folder))
    results: dict[TaskName, TaskResult] = {
        task: TaskResult(
            loss=described(config.teachers[task].loss),
            teacher_accuracy=accuracy(teacher, folders[teacher.name], task, seed),
            student_before=accuracy(student, folders[student.name], task, seed),
            student_after=accuracy(student, final, task, seed),
            scored_tokens_per_second=round(rates[task], 1),
        )
        for task, teacher in zip(TASKS, (sums, words), strict=True)
    }
    ended = time.perf_counter()
    seconds = {
        "models": models_done - started,
        "distillation": distilled - models_done,
        "evaluation": ended - distilled,
        "total": ended - started,
    }
    console.print(_table(results))
    summary = output_dir / "summary.json"
    write_json(
        summary,
        {
            "seed": seed,
            "steps": config.max_steps,
            "exercises_per_task": EXERCISES,
            "tasks": {task: asdict(result) for task, result in results.items()},
            "wall_seconds": {phase: round(value, 1) for phase, value in seconds.items()},
        },
    )
    console.print(
        f"seed {seed}, {config.max_steps} steps of {config.rollout.prompts_per_step} completions, "
        f"{seconds['total']:.0f} s ({seconds['models']:.0f} models, "
        f"{seconds['distillation']:.0f} distillation, {seconds['evaluation']:.0f} evaluation); "
        f"results in {summary}, student in {final}",
        soft_wrap=True,
    )


def distillation(
    output_dir: Path,
    *,
    prompts: Path,
    student: Path,
    teachers: Mapping[str, Mapping[str, Any]],
    steps: int,
    seed: int,
) -> RunConfig:
    """Return a run with the demo's sizes and learning rate."""
    values: dict[str, Any] = {
        "exp_name": "demo",
        "seed": seed,
        "output_dir": output_dir,
        "max_steps": steps,
        "logging_steps": 25,
        "logging": {"completions": 4},
        "data": {"prompts": prompts},
        "student": {
            "model": str(student),
            "device": "cpu",
            "learning_rate": 2e-3,
            "warmup_steps": 20,
            "min_learning_rate_ratio": 0.1,
            "betas": [0.9, 0.98],
            "weight_decay": 0.01,
            "tokens_per_micro_batch": 4_096,
        },
        "rollout": {"prompts_per_step": 64, "max_new_tokens": 12, "generation_batch_size": 32},
        "teachers": {name: {"top_k": 16, **settings} for name, settings in teachers.items()},
    }
    return RunConfig.model_validate(values)


def write_prompts(path: Path, routed: Iterable[tuple[Exercise, str | Mapping[str, float]]]) -> None:
    """Save prompts with their teachers, without completions, as JSON lines."""
    lines = (
        {"messages": [m.model_dump() for m in exercise.messages], "teacher": teachers}
        for exercise, teachers in routed
    )
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Save values as indented JSON."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n")


def read_journal(run_folder: Path) -> list[dict[str, float]]:
    """Load the metrics of every step."""
    return [json.loads(line) for line in (run_folder / "journal.jsonl").read_text().splitlines()]


def accuracy(
    recipe: Recipe, folder: Path, task: TaskName, seed: int, exercises: int = EXERCISES
) -> float:
    """Return the exact-match accuracy of a model folder on held-out exercises."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return exact_match(
        model, Encoder(recipe.tokenizer()), held_out_exercises(task, exercises, seed)
    )


def _scoring_rates(steps: list[dict[str, float]]) -> dict[TaskName, float]:
    return {
        task: sum(step[f"teacher/{task}/scored_tokens"] for step in steps)
        / sum(step[f"teacher/{task}/score_seconds_total"] for step in steps)
        for task in TASKS
    }


def _table(results: Mapping[TaskName, TaskResult]) -> Table:
    headings = ("teacher", "student before", "student after", "teacher tokens/s")
    table = result_table("task", "loss", *headings)
    for task, result in results.items():
        table.add_row(
            task,
            result.loss,
            f"{result.teacher_accuracy:.1%}",
            f"{result.student_before:.1%}",
            f"{result.student_after:.1%}",
            f"{result.scored_tokens_per_second:,.0f}",
        )
    return table


def result_table(first: str, second: str, *numbers: str) -> Table:
    """Return an empty table with two text columns and right-aligned numbers."""
    table = Table(first, second, box=box.SIMPLE_HEAD)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table
