"""Train one student by mopd's trainer and by TRL's, whose teacher has another tokenizer.

    python -m bench.trl_translation --trl-python .doors/trl/bin/python
    python -m bench.trl_translation --task sums --seeds 0 --arms mopd,trl_server

The teacher of the demo's task is served with translation to the student's ids. All runs have the
same student, prompts, completions per step, optimizer, learning rate of every step, divergence
(forward KL) and K; the students are graded by ``mopd evaluate``.

arms:
  mopd              plain on-policy samples at temperature 1
  mopd_defaults     mopd's default sampling: corrections, temperature 0.6, importance weights
  trl_server        TRL's ServerDistillationTrainer, beta 0
  trl_service_loss  ServiceLoss in front of TRL's DistillationTrainer, beta 0
"""

import argparse
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console

from mopd.demo.recipes import STUDENT, SUMS_TEACHER, WORDS_TEACHER
from mopd.demo.run import (
    PROMPTS,
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
from mopd_trainer import ImportanceConfig, RunConfig, evaluate, train

ARMS = ("mopd", "mopd_defaults", "trl_server", "trl_service_loss")
_TEACHERS = {"words": WORDS_TEACHER, "sums": SUMS_TEACHER}
_TRL_SCRIPT = Path(__file__).parent / "trl_training.py"
_COUNTERS = ("positions", "positions_without_signal", "named_mass", "lost_top1", "extra_rows")


@dataclass(frozen=True)
class Result:
    """One run."""

    arm: str
    seed: int
    curve: Mapping[int, float]  # steps -> greedy accuracy
    seconds: float
    coverage: Mapping[str, float]  # of the service's translations during the run


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every arm for every seed, and print curves and a table."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    console = Console()
    results = [result for seed in options.seeds for result in _run_seed(seed, options, console)]
    table = result_table("arm", "seed", "before", "after", "named", "lost", "seconds")
    for each in results:
        positions = each.coverage["positions"] - each.coverage["positions_without_signal"]
        shares = (each.coverage[name] / max(positions, 1) for name in ("named_mass", "lost_top1"))
        translated = [f"{share:.2%}" if positions else "" for share in shares]
        accuracy = [f"{each.curve[step]:.1%}" for step in (0, max(each.curve))]
        table.add_row(each.arm, str(each.seed), *accuracy, *translated, f"{each.seconds:.0f}")
    console.print(table)
    write_json(options.runs / f"{options.task}.json", {"results": [vars(each) for each in results]})


def _run_seed(seed: int, options: argparse.Namespace, console: Console) -> list[Result]:
    folder: Path = options.runs / f"{options.task}-{seed}"
    recipes = [
        replace(recipe, steps=min(recipe.steps, options.model_steps or recipe.steps))
        for recipe in (_TEACHERS[options.task], replace(STUDENT, seed=seed))
    ]
    models = [
        train_models([recipe], options.runs / "models" / str(recipe.seed), console, processes=1)
        for recipe in recipes
    ]
    teacher, student = (m[recipe.name] for m, recipe in zip(models, recipes, strict=True))
    random, prompts = Random(seed), folder / "prompts.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    routed = (
        (draw_training(options.task, random), options.task) for _ in range(PROMPTS[options.task])
    )
    write_prompts(prompts, routed)
    exercises = held_out_exercises(options.task, options.exercises, seed)
    held_out = write_held_out(folder / "held-out.jsonl", exercises) | {"samples": 0}
    served = ["--student", str(student), "--prompts", str(prompts)]
    results: list[Result] = []
    with teacher_services({options.task: teacher}, folder / "logs", served) as addresses:
        [url] = addresses.values()
        config = distillation(
            folder / "mopd",
            prompts=prompts,
            student=student,
            teachers={
                options.task: {"url": url, "loss": {"type": "auto", "divergence": "forward_kl"}}
            },
            steps=options.steps,
            seed=seed,
            evaluation={"every": options.every, "sets": {"held-out": held_out}},
        )
        for arm in options.arms:
            before, started = _counters(url), time.perf_counter()
            curve = _run(arm, config, folder / arm, url, options)
            seconds = round(time.perf_counter() - started, 1)
            coverage = {name: value - before[name] for name, value in _counters(url).items()}
            results.append(Result(arm, seed, curve, seconds, coverage))
            console.print(f"{arm}, seed {seed}: {curve}", soft_wrap=True)
    return results


def _run(
    arm: str, config: RunConfig, folder: Path, url: str, options: argparse.Namespace
) -> Mapping[int, float]:
    shutil.rmtree(folder, ignore_errors=True)
    on_policy = {"temperature": 1.0, "corrections": 0}
    rollout = config.rollout.model_copy(update={} if arm == "mopd_defaults" else on_policy)
    update: dict[str, Any] = {"output_dir": folder, "rollout": rollout}
    if arm != "mopd_defaults":
        update["importance_weights"] = ImportanceConfig(least=1)
    config = RunConfig.model_validate(config.model_copy(update=update).model_dump())
    if arm.startswith("mopd"):
        train(config)
        return accuracies(read_journal(folder), "held-out")
    _train_by_trl(arm, config, url, options)
    models = {0: Path(config.student.model)}
    models |= {
        step: folder / f"checkpoint-{step}"
        for step in range(options.every, options.steps + 1, options.every)
    }
    return {step: evaluate(model, config)["held-out"]["accuracy"] for step, model in models.items()}


def _train_by_trl(arm: str, config: RunConfig, url: str, options: argparse.Namespace) -> None:
    student = config.student
    job = {
        "trainer": arm.removeprefix("trl_"),
        "url": url,
        "top_k": config.teachers[options.task].top_k,
        "student": student.model,
        "prompts": str(config.data.prompts),
        "output_dir": str(config.output_dir),
        "learning_rates": [
            student.learning_rate_at(step, max_steps=options.steps) for step in range(options.steps)
        ],
        "betas": student.betas,
        "weight_decay": student.weight_decay,
        "max_grad_norm": student.max_grad_norm,
        "completions_per_step": config.rollout.prompts_per_step,
        "max_new_tokens": config.rollout.max_new_tokens,
        "temperature": config.rollout.temperature,
        "save_steps": options.every,
        "seed": config.seed,
    }
    path = config.output_dir.with_suffix(".json")
    path.write_text(json.dumps(job))
    with config.output_dir.with_suffix(".log").open("w", encoding="utf-8") as log:
        command = [str(options.trl_python), str(_TRL_SCRIPT), str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)


def _counters(url: str) -> dict[str, float]:
    """Return the totals of the service's translations."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(values[f"mopd_translation_{name}_total"]) for name in _COUNTERS}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", type=Path, default=Path(".doors/trl/bin/python"))
    parser.add_argument("--task", choices=tuple(_TEACHERS), default="words")
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS))
    parser.add_argument(
        "--seeds",
        type=lambda text: [int(seed) for seed in text.split(",")],
        default=[0, 1, 2],
        help="of student, prompts and samples (default: 0,1,2)",
    )
    parser.add_argument("--steps", type=int, default=200, help="of 64 completions (default: 200)")
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--exercises", type=int, default=400, help="held out (default: 400)")
    parser.add_argument("--model-steps", type=int, help="upper bound, to test the program")
    parser.add_argument("--runs", type=Path, default=Path("runs/trl_translation"))
    return parser


if __name__ == "__main__":
    main()
