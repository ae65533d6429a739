"""Repair a pruned language model on-policy by the whole one, or distil any pair of models.

    python -m bench.language_model --teacher MODEL --folder runs/lm
    python -m bench.language_model --teacher FOLDER --gguf-file NAME.gguf --folder runs/lm
    python -m bench.language_model --teacher MODEL --student OTHER --folder runs/lm
    python -m bench.language_model --teacher MODEL --removed-layers 0 --student-tokenizer \
        OTHER/tokenizer.json --folder runs/lm

Without ``--student``, four layers around the middle of the teacher are removed. With
``--student-tokenizer``, the student gets another tokenizer, and embeddings that are means of the
teacher's: it has to learn its new tokens by distillation. Held-out prompts have topics of no
training prompt. Measured before and after, on the teacher's greedy completions: nats per token and
agreement of the most likely token (with the teacher's tokenizer), bits per byte; bits per byte of
the teacher's samples at temperature 1, entropy of the student's own, and bits per byte of texts
that no model generated; with 95 % ranges over the prompts, and of the change. Stopped by SIGTERM,
it measures the last checkpoint; the same command resumes. GGUF needs the package ``gguf``.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

import mopd
from bench.language_model.material import held_out_prompts, prompts
from bench.language_model.measurement import (
    Change,
    Completion,
    Measure,
    Reference,
    completed,
    measure,
)
from bench.language_model.models import (
    middle_layers,
    save_pruned,
    save_teacher,
    save_with_tokenizer,
)
from bench.numerals.options import add_corrections, add_least_importance, add_temperature
from mopd_trainer import RunConfig, Student, StudentConfig
from mopd_trainer.interruption import Interrupted


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare the models, train, measure, print a table and save the figures."""
    options = _parser().parse_args(arguments)
    console, folder = Console(), options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if options.threads:
        torch.set_num_threads(options.threads)
    teacher_folder = save_teacher(options.teacher, options.gguf_file, folder / "teacher")
    student_folder = options.student
    if student_folder is None:
        layers = AutoConfig.from_pretrained(teacher_folder).num_hidden_layers
        removed = middle_layers(layers, options.removed_layers)
        console.print(f"student: the teacher without layers {removed} of {layers}")
        student_folder = save_pruned(teacher_folder, removed, folder / "student")
    if options.student_tokenizer is not None:
        student_folder = save_with_tokenizer(
            Path(student_folder), options.student_tokenizer, folder / "student-other-tokenizer"
        )
    held_out = held_out_prompts(options.held_out)
    teacher = _load(teacher_folder)
    reference = Reference.of(teacher, held_out, options.max_new_tokens)
    figures: dict[str, Any] = {"teacher": measure(teacher, reference, same_tokenizer=True)}
    fingerprint = teacher.table.fingerprint
    del teacher
    same, figures["before"], example = _measured(student_folder, reference, fingerprint)
    figures["examples"] = {
        "prompt": held_out[0],
        "teacher": reference.greedy[0].text,
        "before": example,
    }
    _show(console, figures)
    config = run_config(options, str(student_folder), str(teacher_folder), reference.greedy)
    started = time.process_time()
    try:
        trained = mopd.train(config)
    except Interrupted as stopped:  # measure what there is; the same command resumes
        console.print(str(stopped), markup=False)
        trained = max(config.output_dir.glob("checkpoints/step-*")) / "model"
    figures["processor_seconds"] = time.process_time() - started
    lines = (config.output_dir / "journal.jsonl").read_text().splitlines()
    figures["journal"] = [json.loads(line) for line in lines]
    _, figures["after"], example = _measured(trained, reference, fingerprint)
    figures["examples"]["after"] = example
    figures["change"] = {
        key: Change.of(measured, figures["after"][key], figures["teacher"][key])
        for key, measured in figures["before"].items()
    }
    figures["same_tokenizer"] = same
    figures["settings"] = {key: str(value) for key, value in vars(options).items()}
    _show(console, figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1, default=asdict) + "\n")


def run_config(
    options: argparse.Namespace,
    student: str,
    teacher: str,
    completions: Sequence[Completion],
) -> RunConfig:
    """Write the prompts and return the settings of the run."""
    folder: Path = options.folder
    path = _write_lines(folder / "prompts.jsonl", [{"prompt": p} for p in prompts(options.prompts)])
    held_out = [{"prompt": c.prompt, "answer": c.text} for c in completions if c.text]
    likelihood = {
        "prompts": _write_lines(folder / "held-out.jsonl", held_out),
        "answer_key": "answer",
        "grader": "log_likelihood",
    }
    return RunConfig.model_validate(
        {
            "exp_name": "language-model",
            "output_dir": options.folder / f"run-{options.loss}-{options.divergence}",
            "seed": options.seed,
            "max_steps": options.steps,
            "save_steps": options.save_steps,
            "keep_checkpoints": 1,
            "resume_from_checkpoint": True,
            "data": {"prompts": path},
            "student": {
                "model": student,
                "device": options.device,
                "learning_rate": options.learning_rate,
                "warmup_steps": min(5, options.steps),
                "min_learning_rate_ratio": 0.1,
            },
            "rollout": {
                "prompts_per_step": options.prompts_per_step,
                "generation_batch_size": options.prompts_per_step,
                "max_new_tokens": options.max_new_tokens,
                "scoring": "after_rollout",
                **({} if options.temperature is None else {"temperature": options.temperature}),
                "corrections": options.corrections,
            },
            "teachers": {
                "whole": {
                    **_place(options.teacher_url, teacher),
                    "top_k": options.top_k,
                    "loss": {"type": options.loss, "divergence": options.divergence},
                }
            },
            "importance_weights": {"least": options.least_importance},
            "evaluation": {"every": options.evaluate_every, "sets": {"completions": likelihood}},
            "logging": {"tensorboard": False},
        }
    )


def _place(url: str | None, model: str) -> dict[str, str]:
    return {"placement": "local", "model": model} if url is None else {"url": url}


def _write_lines(path: Path, lines: Sequence[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _measured(
    folder: str | Path, reference: Reference, fingerprint: str
) -> tuple[bool, dict[str, Measure], str]:
    """Return True for the teacher's tokenizer, the measures, and the first greedy completion."""
    student = _load(folder)
    same = student.table.fingerprint == fingerprint
    first = completed(student, [reference.greedy[0].prompt], reference.longest)[0].text
    return same, measure(student, reference, same_tokenizer=same), first


def _load(folder: str | Path) -> Student:
    return Student.load(StudentConfig(model=str(folder), device="cpu"))


def _show(console: Console, figures: dict[str, Any]) -> None:
    columns = [name for name in ("teacher", "before", "after", "change") if name in figures]
    table = Table("", *columns)
    for key in figures["before"]:
        table.add_row(key, *(str(figures[name].get(key, "")) for name in columns))
    console.print(table)
    for name in ("teacher", "before", "after"):
        if name in figures["examples"]:
            console.print(f"{name}: {figures['examples'][name]!r}", markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bench.language_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--teacher", required=True, help="model folder or hub name")
    parser.add_argument("--gguf-file", help="GGUF file in the teacher's folder")
    parser.add_argument(
        "--teacher-url",
        help="a service with the model in FOLDER/teacher (default: the trainer loads it)",
    )
    parser.add_argument("--student", help="default: the teacher without some layers")
    parser.add_argument("--removed-layers", type=int, default=4)
    parser.add_argument(
        "--student-tokenizer", type=Path, metavar="FILE", help="tokenizer.json for the student"
    )
    parser.add_argument("--folder", type=Path, required=True, help="models and the run")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-steps", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps")
    parser.add_argument("--seed", type=int, default=0, help="of samples and the order of prompts")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--loss", default="auto", help="default: by the student's tokenizer")
    parser.add_argument("--divergence", default="forward_kl")
    add_least_importance(parser)
    add_temperature(parser)
    add_corrections(parser, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    main()
