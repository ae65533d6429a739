"""Models before distillation: teachers trained on a task, students for a warm start."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.numerals.accuracy import accuracy
from bench.numerals.pairs import Side
from bench.numerals.warm_start import train_until
from mopd.demo import models
from mopd.demo.examples import IGNORED, Batch, Encoder, supervised_batch
from mopd.demo.tasks import Exercise
from mopd.demo.training import supervised_losses
from mopd_protocol import replacing_folder
from mopd_trainer import Student

Role = Literal["teacher", "student"]
#: (steps done, steps in all)
Report = Callable[[int, int], None]

#: Incremented when code that determines a model changes without a change of these settings.
_VERSION = 2
_ACCURACY = "held_out_accuracy.json"


def model_folder(side: Side, role: Role, seed: int, root: Path) -> Path:
    """Return the folder of a model, named by everything that determines its weights."""
    return root / f"{role}-{model_key(side, role, seed)}"


def model_key(side: Side, role: Role, seed: int) -> str:
    """Return 16 hex digits of everything that determines a model's weights, up to rounding."""
    decisive = {
        "version": _VERSION,
        "role": role,
        "seed": seed,
        "task": repr(side.task),
        "family": side.family,
        "steps": side.steps,
        "examples_per_step": side.examples_per_step,
        "corruption": side.corruption,
        "misreading": side.misreading,
        "learning_rate": side.learning_rate,
        "sizes": [models.HIDDEN_SIZE, models.LAYERS, models.HEADS],
        "tokenizer": side.tokenizer().backend_tokenizer.to_str(),
    }
    if side.completion:
        decisive["completion"] = repr(side.completion)
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def held_out_accuracy(side: Side, role: Role, seed: int, root: Path) -> dict[str, float]:
    """Return what ``train_model`` measured on held-out exercises, by name:

    ``greedy`` accuracy, ``sampled`` accuracy (the mean probability of a reference answer), and
    ``nats`` of a reference answer, in the model's tokens.
    """
    figures: dict[str, float] = json.loads(
        (model_folder(side, role, seed, root) / _ACCURACY).read_text()
    )
    return figures


def train_model(side: Side, role: Role, seed: int, root: Path, report: Report) -> Path:
    """Return the Hugging Face folder of the model, and train the model if the folder is missing."""
    folder = model_folder(side, role, seed, root)
    if folder.is_dir():
        return folder
    tokenizer = side.tokenizer()
    encoder = Encoder(tokenizer)
    model = models.build_model(side.family, tokenizer, seed)
    if side.completion:
        train_until(
            model,
            encoder,
            side.completion,
            seed=seed,
            steps=side.steps,
            examples_per_step=side.examples_per_step,
            learning_rate=side.learning_rate,
            report=report,
        )
    else:
        _train(model, encoder, side, role, seed, report)
    held_out = side.task.held_out()
    logprobs = reference_logprobs(model, encoder, held_out)
    with replacing_folder(folder) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        student = Student(model, tokenizer, torch.device("cpu"))
        figures = {
            "greedy": asyncio.run(accuracy(student, held_out, side.max_new_tokens)),
            "sampled": logprobs.exp().mean().item(),
            "nats": -logprobs.mean().item(),
        }
        (unfinished / _ACCURACY).write_text(json.dumps(figures) + "\n")
    return folder


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, encoder: Encoder, exercises: Sequence[Exercise]
) -> Tensor:
    """Return nats [exercises] of the reference answers, end of turn included."""
    batch = supervised_batch(encoder, exercises, 0.0, Random(0))
    logits: Tensor = model(input_ids=batch.token_ids, attention_mask=batch.attention).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), batch.labels[:, 1:], ignore_index=IGNORED, reduction="none"
    )
    return -losses.sum(dim=1)


def _train(
    model: PreTrainedModel, encoder: Encoder, side: Side, role: Role, seed: int, report: Report
) -> None:
    random, known = Random(seed), side.task.training(seed)
    wrong = torch.tensor(side.task.wrong_ids(encoder), dtype=torch.int64)

    def batch() -> Batch:
        exercises = [_shown(side, role, known, random) for _ in range(side.examples_per_step)]
        parts = side.task.random_part
        correct = supervised_batch(encoder, exercises, side.corruption, random, parts)
        read = replace_tokens(correct, wrong, side.misreading, encoder.end_of_turn)
        return replace(correct, token_ids=read)

    losses = supervised_losses(model, batch, side.steps, side.learning_rate)
    for step, _ in enumerate(losses, start=1):
        report(step, side.steps)


def replace_tokens(batch: Batch, wrong: Tensor, probability: float, end: int) -> Tensor:
    """Return the batch's ids [examples, tokens], some completion tokens replaced by ``wrong`` ones.

    The labels remain correct. A teacher scores samples of students, and would otherwise never have
    seen most numbers in its context.
    """
    if not probability:
        return batch.token_ids
    in_completion = (batch.labels != IGNORED) & (batch.labels != end)
    chosen = in_completion & (torch.rand(batch.labels.shape) < probability)
    drawn = wrong[torch.randint(len(wrong), batch.labels.shape)]
    return torch.where(chosen, drawn, batch.token_ids)


def _shown(side: Side, role: Role, known: Sequence[Exercise], random: Random) -> Exercise:
    exercise = random.choice(known)
    return exercise if role == "teacher" else side.task.warm_start(exercise, random)
