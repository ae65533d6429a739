"""Context distillation: examples in the teacher's prompt, none in the student's.

    python -m bench.context_distillation --seeds 3 --json OUT
    python -m bench.context_distillation --weights average
    python -m bench.context_distillation --quick

One tiny model is trained to spell a date (``17.01.2024``, of ``bench.tasks``) in one of three
forms. Which form is required, only examples in the prompt show; without them, the forms are equally
likely. The model then is its own teacher (``kind: self``) behind two examples of one form
(``prompt_key: shots``), and the student has only the date. Reported is the accuracy on held-out
dates, greedy and sampled, of the student before and after, and of the teacher with its examples.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.tasks.exercises import Dates
from bench.tasks.task_tokenizers import digit_tokenizer
from mopd.demo.examples import Batch, Encoder, supervised_batch
from mopd.demo.models import build_model
from mopd.demo.tasks import Exercise
from mopd.demo.training import supervised_losses
from mopd_protocol import replacing_folder
from mopd_trainer import RunConfig, train

#: Other forms of the dates of ``bench.tasks``.
_FORMS: Mapping[str, Callable[[datetime], str]] = {
    "iso": lambda day: f"{day:%Y-%m-%d}",
    "slashes": lambda day: f"{day:%Y/%d/%m}",
}
_FORM_NAMES = ("dates", *_FORMS)
_EXAMPLES = 2
#: Share of the training prompts without examples.
_WITHOUT = 0.25
_MODEL_STEPS, _STEPS, _QUICK_STEPS = 1_000, 100, 2
_BATCH = 48
_PROMPTS, _HELD_OUT = 2_000, 200
_TASK = Dates()


def form_of(exercise: Exercise, form: str) -> Exercise:
    """Return the exercise with its date in one of the forms."""
    if form == "dates":
        return exercise
    text = _FORMS[form](datetime.strptime(exercise.prompt, "%d.%m.%Y"))
    return Exercise(form, exercise.prompt, (text,))


def query(exercise: Exercise) -> str:
    """Return the prompt without examples."""
    return f"{exercise.prompt} ->"


def with_examples(exercise: Exercise, known: Sequence[Exercise], form: str, random: Random) -> str:
    """Return the prompt behind examples of a form."""
    chosen = [form_of(each, form) for each in random.sample(known, _EXAMPLES)]
    shown = [f"{query(each)} {each.completion}" for each in chosen]
    return "\n".join([*shown, query(exercise)])


def model_in(root: Path, steps: int, seed: int, console: Console) -> Path:
    """Return the folder of the model, and train the model if the folder is missing."""
    folder = root / f"model-{steps}-{seed}"
    if folder.is_dir():
        return folder
    tokenizer, random = digit_tokenizer(), Random(seed)
    encoder, known = Encoder(tokenizer), _TASK.training(seed)
    model = build_model("qwen3", tokenizer, seed)

    def batch() -> Batch:
        return supervised_batch(encoder, _shown(known, random), 0.0, random)

    for step, loss in enumerate(supervised_losses(model, batch, steps, 2e-3), start=1):
        if step % 200 == 0:
            console.print(f"model: step {step} of {steps}, {loss:.4f} nats per token")
    with replacing_folder(folder) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    return folder


def _shown(known: Sequence[Exercise], random: Random) -> list[Exercise]:
    exercises: list[Exercise] = []
    for _ in range(_BATCH):
        exercise, form = random.choice(known), random.choice(_FORM_NAMES)
        zero_shot = random.random() < _WITHOUT
        prompt = query(exercise) if zero_shot else with_examples(exercise, known, form, random)
        exercises.append(Exercise(form, prompt, form_of(exercise, form).completion_parts))
    return exercises


def distil(
    model: Path, root: Path, *, form: str, seed: int, steps: int, teacher: Mapping[str, Any]
) -> dict[str, float]:
    """Distil one form; return accuracies of the student before and after, and of the teacher."""
    output = root / f"run-{form}-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    random, known = Random(seed), _TASK.training(seed)
    lines = _lines(known[:_PROMPTS], known, form, random)
    held_out = _lines(_TASK.held_out()[:_HELD_OUT], known, form, random)
    settings: dict[str, Any] = {
        "seed": seed,
        "output_dir": output / "run",
        "max_steps": steps,
        "logging_steps": max(1, steps // 4),
        "logging": {"tensorboard": False},
        "data": {
            "prompts": _write(output / "prompts.jsonl", lines),
            "answer_key": "completion",
        },
        "student": {"model": str(model), "device": "cpu", "learning_rate": 1e-3, "warmup_steps": 5},
        "rollout": {"prompts_per_step": 32, "max_new_tokens": 16, "generation_batch_size": 32},
        "teachers": {"own": {"kind": "self", "prompt_key": "shots", "top_k": 16, **teacher}},
        "evaluation": {
            "every": steps,
            "teachers": True,
            "sets": {
                "dates": {
                    "prompts": _write(output / "held_out.jsonl", held_out),
                    "answer_key": "completion",
                }
            },
        },
    }
    started = time.perf_counter()
    train(RunConfig.model_validate(settings))
    journal = [json.loads(line) for line in (output / "run/journal.jsonl").read_text().splitlines()]
    measured: dict[str, float] = {"seconds": time.perf_counter() - started}
    for key in ("accuracy", "sampled_accuracy"):
        values = [line[name] for line in journal if (name := f"evaluation/dates/{key}") in line]
        (teachers,) = {
            line[name]
            for line in journal
            if (name := f"evaluation/dates/teacher/own/{key}") in line
        }
        measured |= {f"{key}_before": values[0], f"{key}_after": values[-1]}
        measured[f"{key}_teacher"] = teachers
    copied = [line["teacher/own/copied_share"] for line in journal if "loss" in line]
    return measured | {"copied_share": copied[-1]}


def _lines(
    exercises: Sequence[Exercise], known: Sequence[Exercise], form: str, random: Random
) -> list[dict[str, str]]:
    return [
        {
            "prompt": query(each),
            "shots": with_examples(each, known, form, random),
            "completion": form_of(each, form).completion,
        }
        for each in exercises
    ]


def _write(path: Path, lines: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def table_of(results: Mapping[int, Mapping[str, float]], form: str) -> Table:
    """Return the accuracies by seed."""
    table = Table(title=f"context distillation of form {form!r}, {_HELD_OUT} held-out dates")
    for column in ("seed", "", "student before", "student after", "teacher", "after / teacher"):
        table.add_column(column, justify="right")
    for seed, measured in results.items():
        for key, name in (("accuracy", "greedy"), ("sampled_accuracy", "sampled")):
            before, after, teacher = (
                measured[f"{key}_{side}"] for side in ("before", "after", "teacher")
            )
            share = f"{after / teacher:.3f}" if teacher else "-"
            table.add_row(str(seed), name, f"{before:.3f}", f"{after:.3f}", f"{teacher:.3f}", share)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the model if it is missing, distil with each seed, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/context"), metavar="DIR")
    parser.add_argument("--form", choices=_FORM_NAMES, default="dates")
    parser.add_argument("--seeds", type=int, default=1, metavar="N")
    parser.add_argument("--steps", type=int, default=_STEPS, metavar="N")
    parser.add_argument("--weights", choices=("start", "live", "average"), default="start")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="2 steps of everything")
    options = parser.parse_args(arguments)
    console = Console()
    steps = _QUICK_STEPS if options.quick else options.steps
    model_steps = _QUICK_STEPS if options.quick else _MODEL_STEPS
    model = model_in(options.runs, model_steps, 0, console)
    results = {
        seed: distil(
            model,
            options.runs,
            form=options.form,
            seed=seed,
            steps=steps,
            teacher={"weights": options.weights},
        )
        for seed in range(options.seeds)
    }
    console.print(table_of(results, options.form))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
