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

from mopd.demo.recipes import RECIPES
from mopd.demo.services import teacher_services
from mopd.demo.tasks import (
    MAX_COMPLETION_TOKENS,
    TASKS,
    Exercise,
    TaskName,
    draw_training,
    held_out_exercises,
)
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
#: Steps between evaluations.
EVALUATION_STEPS = 100
#: One direction of the KL per teacher.
DIVERGENCES = {"sums": "forward_kl", "words": "reverse_kl"}


@dataclass(frozen=True)
class TaskResult:
    """One row of the table: shares of held-out exercises with an exact match, greedy."""

    loss: str
    teacher_accuracy: float
    student_before: float
    student_after: float
    curve: Mapping[int, float]
    """Steps -> the student's accuracy."""
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
    sets = {
        task: {
            **write_held_out(output_dir / f"held-out-{task}.jsonl", exercises),
            "teachers": [task],
        }
        for task in TASKS
        for exercises in [held_out_exercises(task, EXERCISES, seed)]
    }
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
                name: {"url": url, "loss": {"type": "auto", "divergence": DIVERGENCES[name]}}
                for name, url in addresses.items()
            },
            steps=steps or STEPS,
            seed=seed,
            evaluation={"every": EVALUATION_STEPS, "teachers": True, "sets": sets},
        )
        final = train(config)
    ended = time.perf_counter()
    console.print(f"[bold]3. Exact match on {EXERCISES} held-out exercises per task, greedy")
    journal = read_journal(run_folder)
    results: dict[TaskName, TaskResult] = {task: _result(task, config, journal) for task in TASKS}
    seconds = {
        "models": models_done - started,
        "distillation": ended - models_done,
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
        f"{seconds['distillation']:.0f} distillation with evaluation); results in {summary}, "
        f"student in {final}",
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
    evaluation: Mapping[str, Any],
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
        "evaluation": evaluation,
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


def write_held_out(path: Path, exercises: Iterable[Exercise]) -> dict[str, Any]:
    """Save exercises as JSON lines; return the settings of an evaluation set of them."""
    lines = ({"prompt": each.prompt, "completion": each.completion} for each in exercises)
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"prompts": path, "answer_key": "completion", "max_new_tokens": MAX_COMPLETION_TOKENS}


def accuracies(journal: Iterable[Mapping[str, float]], name: str) -> dict[int, float]:
    """Return steps -> greedy accuracy on an evaluation set."""
    key = f"evaluation/{name}/accuracy"
    return {int(line["step"]): line[key] for line in journal if key in line}


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Save values as indented JSON."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n")


def read_journal(run_folder: Path) -> list[dict[str, float]]:
    """Load the metrics of every step."""
    return [json.loads(line) for line in (run_folder / "journal.jsonl").read_text().splitlines()]


def _result(task: TaskName, config: RunConfig, journal: list[dict[str, float]]) -> TaskResult:
    curve = accuracies(journal, task)
    tokens, seconds = (
        sum(line.get(f"teacher/{task}/{name}", 0.0) for line in journal)
        for name in ("scored_tokens", "score_seconds_total")
    )
    return TaskResult(
        loss=described(config.teachers[task].loss),
        teacher_accuracy=journal[0][f"evaluation/{task}/teacher/{task}/accuracy"],
        student_before=curve[0],
        student_after=curve[config.max_steps],
        curve=curve,
        scored_tokens_per_second=round(tokens / seconds, 1),
    )


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
