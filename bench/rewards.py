"""Rewards with a teacher that is wrong on a third of the prompts.

    python -m bench.rewards --seeds 3 --json OUT
    python -m bench.rewards --arms teacher,reward,failed
    python -m bench.rewards --quick

The task is the month of a date (``17.01.2024``: ``January``). The teacher, a tiny model, was
trained with the next month in place of May to August: it completes the other eight months
correctly, and none of these four. The student was trained with random months, and completes one
date in twelve. Each arm has the same prompts, completions a step, steps and learning rate: the
teacher only; a reward for the correct month only; both, with several weights and gates. Reported is
the greedy accuracy on held-out dates by step: of all, and of the months that the teacher has wrong.
"""

import argparse
import json
import shutil
import time
from calendar import month_name
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from bench.numerals.warm_start import completed_share
from bench.tasks.exercises import Dates
from bench.tasks.task_tokenizers import digit_tokenizer
from mopd.demo.examples import Encoder, supervised_batch
from mopd.demo.models import build_model
from mopd.demo.tasks import Exercise
from mopd.demo.training import optimizer_of, supervised_step, warm_up_and_cosine
from mopd_protocol import replacing_folder
from mopd_trainer import RunConfig, train

#: Months for which the teacher has learned the next one.
_MISTAKEN = ("May", "June", "July", "August")
_AFTER = ("June", "July", "August", "September")
#: Teacher's settings and reward's settings; None: without.
ARMS: Mapping[str, tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]] = {
    "teacher": ({}, None),
    "reward": (None, {}),
    "equal": ({}, {}),
    "light": ({"weight": 0.2}, {}),
    "failed": ({}, {"distill": "failed"}),
    "failed-light": ({"weight": 0.2}, {"distill": "failed"}),
}
_TEACHER_STEPS, _STUDENT_STEPS, _STEPS, _QUICK_STEPS = 400, 150, 300, 2
_PROMPTS_PER_STEP, _SAMPLES = 16, 4
_PROMPTS, _HELD_OUT, _EVALUATIONS = 2_000, 200, 4
_BATCH = 48


class Months(Dates):
    """``17.01.2024``: ``January``."""

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        exercise = super().draw(random)
        return Exercise("months", exercise.prompt, exercise.completion_parts[:1])


class MistakenMonths(Months):
    """The next month in place of May to August."""

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        exercise = super().draw(random)
        [month] = exercise.completion_parts
        taught = dict(zip(_MISTAKEN, _AFTER, strict=True)).get(month, month)
        return Exercise("months", exercise.prompt, (taught,))


class RandomMonths(Months):
    """A random month."""

    def draw(self, random: Random) -> Exercise:
        """See ``TextTask``."""
        return Exercise("months", super().draw(random).prompt, (random.choice(month_name[1:]),))


def is_mistaken(exercise: Exercise) -> bool:
    """Return True for a date whose month the teacher has wrong."""
    return exercise.completion_parts[0] in _MISTAKEN


def model_in(root: Path, task: Months, steps: int, seed: int) -> Path:
    """Return the folder of a model that was trained on a task; train it if it is missing."""
    folder = root / f"{type(task).__name__}-{steps}"
    if folder.is_dir():
        return folder
    tokenizer, random = digit_tokenizer(), Random(seed)
    encoder, known = Encoder(tokenizer), task.training(0)
    model = build_model("qwen3", tokenizer, seed)
    optimizer = optimizer_of(model, 2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_cosine(steps))
    model.train()
    for _ in range(steps):
        exercises = random.choices(known, k=_BATCH)
        batch = supervised_batch(encoder, exercises, 0.0, random)
        supervised_step(model, optimizer, batch)
        schedule.step()
    with replacing_folder(folder) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    return folder


def shares_of(model: Path) -> dict[str, float]:
    """Return a model's greedy accuracy on held-out dates: all, right and mistaken months."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    encoder, held_out = Encoder(digit_tokenizer()), Months().held_out()[:_HELD_OUT]
    subsets = {
        "all": held_out,
        "right": [each for each in held_out if not is_mistaken(each)],
        "mistaken": [each for each in held_out if is_mistaken(each)],
    }
    return {name: completed_share(loaded, encoder, each) for name, each in subsets.items()}


def run_arm(
    arm: str, root: Path, models: tuple[Path, Path], seed: int, steps: int
) -> dict[str, Any]:
    """Train an arm; return its accuracy by step, and the seconds of processor time."""
    student, teacher = models
    output = root / f"run-{arm}-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    taught, rewarded = ARMS[arm]
    held_out = Months().held_out()[:_HELD_OUT]
    sets = {
        "right": [each for each in held_out if not is_mistaken(each)],
        "mistaken": [each for each in held_out if is_mistaken(each)],
    }
    settings: dict[str, Any] = {
        "seed": seed,
        "output_dir": output / "run",
        "max_steps": steps,
        "logging_steps": max(1, steps // 4),
        "logging": {"tensorboard": False},
        "data": {
            "prompts": _write(output / "prompts.jsonl", Months().training(seed)[:_PROMPTS]),
            "answer_key": "completion",
        },
        "student": {
            "model": str(student),
            "device": "cpu",
            "learning_rate": 1e-3,
            "warmup_steps": 5,
        },
        "rollout": {
            "prompts_per_step": _PROMPTS_PER_STEP,
            "samples_per_prompt": _SAMPLES,
            "generation_batch_size": _PROMPTS_PER_STEP * _SAMPLES,
            "max_new_tokens": 4,
            "temperature": 1.0,
        },
        "evaluation": {
            "every": max(1, steps // _EVALUATIONS),
            "sets": {
                name: {
                    "prompts": _write(output / f"{name}.jsonl", exercises),
                    "answer_key": "completion",
                    "samples": 0,
                }
                for name, exercises in sets.items()
            },
        },
    }
    if taught is not None:
        local = {"placement": "local", "model": str(teacher), "top_k": 16}
        settings["teachers"] = {"dates": local | taught}
        settings["rollout"]["scoring"] = "after_rollout"
    if rewarded is not None:
        settings["rewards"] = {"correct": {"grader": "exact", **rewarded}}
    started = time.process_time()
    train(RunConfig.model_validate(settings))
    seconds = time.process_time() - started
    journal = [json.loads(line) for line in (output / "run/journal.jsonl").read_text().splitlines()]
    return {"curve": curve_of(journal), "processor_seconds": seconds}


def curve_of(journal: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the accuracies of each evaluation of a run."""
    held_out = Months().held_out()[:_HELD_OUT]
    mistaken = fmean(map(is_mistaken, held_out))
    curve: list[dict[str, float]] = []
    for line in journal:
        if "evaluation/right/accuracy" not in line:
            continue
        right, wrong = (line[f"evaluation/{name}/accuracy"] for name in ("right", "mistaken"))
        share = (1 - mistaken) * right + mistaken * wrong
        curve.append({"step": line["step"], "all": share, "right": right, "mistaken": wrong})
    return curve


def _write(path: Path, exercises: Sequence[Exercise]) -> Path:
    lines = [{"prompt": each.prompt, "completion": each.completion} for each in exercises]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def table_of(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Return the accuracy of each arm at each evaluation, the mean over the seeds."""
    table = Table(
        title=f"greedy accuracy, {_HELD_OUT} held-out dates (months that are taught wrong)"
    )
    steps = [point["step"] for point in next(iter(results.values()))[0]["curve"]]
    for column in ("arm", *(f"step {step}" for step in steps), "last, by seed", "seconds"):
        table.add_column(column, justify="right")
    for arm, runs in results.items():
        points = list(zip(*(run["curve"] for run in runs), strict=True))
        means = [[fmean(p[name] for p in each) for name in ("all", "mistaken")] for each in points]
        cells = [f"{share:.0%} ({mistaken:.0%})" for share, mistaken in means]
        last = ", ".join(f"{point['all']:.0%}" for point in points[-1])
        seconds = fmean(run["processor_seconds"] for run in runs)
        table.add_row(arm, *cells, last, f"{seconds:.0f}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the models if they are missing, run each arm with each seed, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/rewards"), metavar="DIR")
    parser.add_argument("--arms", default=",".join(ARMS), help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N")
    parser.add_argument("--steps", type=int, default=_STEPS, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="2 steps of everything")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(width=140)
    steps = _QUICK_STEPS if options.quick else options.steps
    teacher_steps, student_steps = (
        (_QUICK_STEPS, _QUICK_STEPS) if options.quick else (_TEACHER_STEPS, _STUDENT_STEPS)
    )
    teacher = model_in(options.runs, MistakenMonths(), teacher_steps, 0)
    console.print(f"teacher {shares_of(teacher)}")
    student = model_in(options.runs, RandomMonths(), student_steps, 1)
    console.print(f"student {shares_of(student)}")
    results: dict[str, list[dict[str, Any]]] = {}
    for seed in range(options.seeds):
        for arm in options.arms.split(","):
            result = run_arm(arm, options.runs, (student, teacher), seed, steps)
            results.setdefault(arm, []).append(result)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    console.print(table_of(results))


if __name__ == "__main__":
    main()
