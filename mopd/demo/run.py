"""``mopd demo``: from nothing to a student distilled from two teachers, and a table of it."""

import asyncio
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from mopd.demo.tasks import TASKS, TaskName, draw_training, held_out_exercises
from mopd.demo.teachers import train_models
from mopd_losses.config import described
from mopd_protocol.runtime.atomic_file import replacing
from mopd_trainer.config.loading import parse_run
from mopd_trainer.config.run import RunConfig
from mopd_trainer.loop import train
from mopd_trainer.run_folder.journal import JOURNAL

#: Held-out exercises a task. A share of 200 has a standard error of at most 3.5 points.
EXERCISES = 200
#: Training prompts, without answers. Sums are the harder task: three prompts for one of words.
PROMPTS: Mapping[TaskName, int] = {"sums": 6_000, "words": 2_000}
#: Sums stay where they are for 200 to 400 steps, by seed and processor, and then rise: after 500 of
#: them one seed had 46 % and another 94 %.
STEPS = 800


@dataclass(frozen=True)
class TaskResult:
    """One line of the table: shares of held-out exercises answered exactly."""

    teacher_accuracy: float
    student_before: float
    student_after: float
    scored_tokens_per_second: float  # teacher tokens over the seconds that requests took


def run_demo(output_dir: Path, *, seed: int, steps: int | None, console: Console) -> None:
    """Trains what is not cached, serves, distils, prints the table and writes ``summary.json``."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    recipes = [replace(recipe, seed=seed) for recipe in RECIPES]
    sums, words, student = recipes
    console.print("[bold]1. Two tiny teachers and a student that knows the form, not the answers")
    folders = train_models(recipes, output_dir / "models", console, processes=2)
    models_done = time.perf_counter()
    console.print("[bold]2. Distillation: the student writes, both teachers read it over HTTP")
    run_folder = output_dir / "distillation"
    shutil.rmtree(run_folder, ignore_errors=True)
    prompts = _write_prompts(output_dir / "prompts.jsonl", seed)
    teachers = {"sums": folders[sums.name], "words": folders[words.name]}
    with teacher_services(teachers, output_dir / "logs") as addresses:
        config = demo_config(
            run_folder,
            prompts=prompts,
            student=folders[student.name],
            addresses=addresses,
            steps=steps or STEPS,
            seed=seed,
        )
        final = asyncio.run(train(config, console))
    distilled = time.perf_counter()
    console.print(f"[bold]3. {EXERCISES} held-out exercises a task, greedy, right to the letter")
    rates = _scoring_rates(run_folder / JOURNAL)
    results: dict[TaskName, TaskResult] = {}
    for task, teacher in zip(TASKS, (sums, words), strict=True):
        results[task] = TaskResult(
            teacher_accuracy=accuracy(teacher, folders[teacher.name], task, seed),
            student_before=accuracy(student, folders[student.name], task, seed),
            student_after=accuracy(student, final, task, seed),
            scored_tokens_per_second=rates[task],
        )
    ended = time.perf_counter()
    seconds = {
        "models": models_done - started,
        "distillation": distilled - models_done,
        "evaluation": ended - distilled,
        "total": ended - started,
    }
    console.print(_table(results, config))
    summary = output_dir / "summary.json"
    _write_summary(summary, results, config, seconds)
    console.print(
        f"seed {seed}, {config.max_steps} steps of {config.rollout.prompts_per_step} completions, "
        f"{seconds['total']:.0f} s ({seconds['models']:.0f} models, "
        f"{seconds['distillation']:.0f} distillation, {seconds['evaluation']:.0f} evaluation); "
        f"numbers in {summary}, the student in {final}",
        soft_wrap=True,
    )


def demo_config(
    output_dir: Path,
    *,
    prompts: Path,
    student: Path,
    addresses: Mapping[str, str],
    steps: int,
    seed: int,
) -> RunConfig:
    """The run, as a YAML file would say it: one CTKD loss in each direction of the KL."""
    teachers = {
        "sums": {"url": addresses["sums"], "loss": {"type": "ctkd", "divergence": "forward_kl"}},
        "words": {"url": addresses["words"], "loss": {"type": "ctkd", "divergence": "reverse_kl"}},
    }
    return distillation(
        output_dir, prompts=prompts, student=student, teachers=teachers, steps=steps, seed=seed
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
    """A run with the demo's sizes and learning rate, and any teachers."""
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
    return parse_run(values, source="demo")


def _write_prompts(path: Path, seed: int) -> Path:
    """Prompts of both tasks, each with its teacher's name and without an answer."""
    random = Random(seed)
    lines = [
        {"messages": [m.model_dump() for m in exercise.messages], "teacher": task}
        for task in TASKS
        for exercise in (draw_training(task, random) for _ in range(PROMPTS[task]))
    ]
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def accuracy(
    recipe: Recipe, folder: Path, task: TaskName, seed: int, exercises: int = EXERCISES
) -> float:
    """The share of held-out exercises that the model in a folder answers exactly."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return exact_match(
        model, Encoder(recipe.tokenizer()), held_out_exercises(task, exercises, seed)
    )


def _scoring_rates(journal: Path) -> dict[TaskName, float]:
    steps = [json.loads(line) for line in journal.read_text().splitlines()]
    return {
        task: sum(step[f"teacher/{task}/scored_tokens"] for step in steps)
        / sum(step[f"teacher/{task}/score_seconds_total"] for step in steps)
        for task in TASKS
    }


def _table(results: Mapping[TaskName, TaskResult], config: RunConfig) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("task")
    table.add_column("loss")
    for heading in ("teacher", "student before", "student after", "teacher tokens/s"):
        table.add_column(heading, justify="right")
    for task, result in results.items():
        table.add_row(
            task,
            described(config.teachers[task].loss),
            f"{result.teacher_accuracy:.1%}",
            f"{result.student_before:.1%}",
            f"{result.student_after:.1%}",
            f"{result.scored_tokens_per_second:,.0f}",
        )
    return table


def _write_summary(
    path: Path,
    results: Mapping[TaskName, TaskResult],
    config: RunConfig,
    seconds: Mapping[str, float],
) -> None:
    summary = {
        "seed": config.seed,
        "steps": config.max_steps,
        "exercises_per_task": EXERCISES,
        "tasks": {
            task: {
                "loss": described(config.teachers[task].loss),
                "teacher_accuracy": result.teacher_accuracy,
                "student_before": result.student_before,
                "student_after": result.student_after,
                "scored_tokens_per_second": round(result.scored_tokens_per_second, 1),
            }
            for task, result in results.items()
        },
        "wall_seconds": {phase: round(value, 1) for phase, value in seconds.items()},
    }
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(summary, indent=2) + "\n")
