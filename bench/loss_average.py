"""Compare ``loss_average`` on teachers with short and with long completions.

Half of the teachers have tasks with completions of 2 or 3 tokens (arithmetic on two digits), half
with 42 to 57 (three digits, continued with a step). Each teacher has the same number of prompts in
a step. A teacher is a table: 0.9 on the right token of each position, the rest on other digits. The
student is a tiny model from random weights; its tokenizer is the teachers' (``topk_kl``).

Accuracy is the share of the run's prompts whose most likely tokens are all right, by teacher. With
``--samples`` the student is trained on its own samples, else on the right answers.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.numerals.numeral_tokenizers import digit_tokenizer
from bench.numerals.pairs import STUDENT_NAMES
from mopd.demo.examples import Encoder
from mopd.demo.models import build_model
from mopd.demo.tasks import Exercise
from mopd_losses import build_loss
from mopd_losses.alignment.byte_alignment import identity_alignment
from mopd_losses.config import TopKKlConfig
from mopd_protocol import Prompt, Rollout
from mopd_protocol.samples import TeacherScore
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer import (
    Learner,
    RolloutConfig,
    Sampler,
    Student,
    StudentConfig,
    TrainingExample,
    micro_batch,
    pack,
)
from mopd_trainer.config.settings import LossAverage
from mopd_trainer.data.examples import AlignedScore
from mopd_trainer.data.teacher_input import token_view

PROMPTS_PER_STEP = 32
LEARNING_RATE = 2e-3
EVALUATED = 40  # prompts of a teacher
CONFIDENCE = 0.9  # of a teacher in the right token
AVERAGES: tuple[LossAverage, ...] = get_args(LossAverage)

_ARITHMETIC: Sequence[Callable[[int, int], int]] = (
    lambda a, b: a + b,
    lambda a, b: abs(a - b),
    lambda a, b: a * b,
    lambda a, b: 2 * a + b,
)


def exercise(task: int, draw: random.Random) -> Exercise:
    """Return a prompt of a task: even ones have short completions, odd ones long."""
    kind, digits = task // 2, [draw.randrange(10) for _ in range(3)]
    if task % 2 == 0:
        completion = str(_ARITHMETIC[kind](digits[0], digits[1]))
        return Exercise(f"task{task}", f"{task}{digits[0]}{digits[1]}", tuple(completion))
    prompt = f"{task}{''.join(map(str, digits))}"
    for position in range(3, 41 + 5 * kind):
        digits.append((digits[position - 3] + kind + 1) % 10)
    return Exercise(f"task{task}", prompt, tuple(map(str, digits)))


class TableTeachers:
    """Teachers of all tasks: the right token of each position is likely after any prefix."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._digits = [encoder.part(str(digit))[0] for digit in range(10)]

    def example(self, item: Exercise, rollout: Rollout) -> TrainingExample:
        """Score a completion."""
        right = self._encoder.completion(item)
        count = len(rollout.completion)
        expected = [*right, *[right[-1]] * count][:count]
        ids = np.array([[token, *self._others(token)] for token in expected], dtype=np.int32)
        masses = np.array([CONFIDENCE, *[(1 - CONFIDENCE) / 4] * 3])
        logprobs = np.log(np.tile(masses, (count, 1))).astype(np.float32)
        tail = np.full(count, np.log((1 - CONFIDENCE) / 4), dtype=np.float32)
        own = rollout.completion.token_ids[:, None] == ids
        token_logprobs = np.where(own.any(axis=1), (logprobs * own).sum(axis=1), tail)
        topk = TopKLogprobs(ids, logprobs, token_logprobs, tail)
        score = TeacherScore("0" * 32, rollout.completion, topk)
        alignment = identity_alignment(count)
        aligned = AlignedScore(item.task, 1.0, token_view(rollout), score, alignment)
        return TrainingExample(rollout, (aligned,))

    def _others(self, token: int) -> list[int]:
        return [digit for digit in self._digits if digit != token][:3]


def right_rollout(student: Student, encoder: Encoder, item: Exercise, prompt: Prompt) -> Rollout:
    """Return the right completion, as if it had been sampled."""
    ids = encoder.completion(item)
    return Rollout(
        prompt=prompt,
        prompt_token_ids=np.array(student.prompt_token_ids(prompt.messages), dtype=np.int32),
        completion=student.table.sequence(ids),
        sampled_logprobs=np.zeros(len(ids), dtype=np.float32),
        finish_reason="stop",
        policy_version=0,
    )


def run(
    teachers: int, average: LossAverage, *, steps: int, seed: int, samples: bool
) -> list[dict[str, Any]]:
    """Train a student; return the accuracy by teacher at ten points of the run."""
    tokenizer = digit_tokenizer(STUDENT_NAMES)
    encoder = Encoder(tokenizer)
    student = Student(build_model("qwen3", tokenizer, seed), tokenizer, torch.device("cpu"))
    config = StudentConfig(model="tiny", learning_rate=LEARNING_RATE, warmup_steps=20)
    names = [f"task{task}" for task in range(teachers)]
    loss = build_loss(TopKKlConfig(), student.identity, student.identity, "cpu")
    learner = Learner(
        student,
        config,
        losses=dict.fromkeys(names, loss),
        teacher_weights=dict.fromkeys(names, 1.0),
        max_steps=steps,
        seed=seed,
    )
    rollouts = RolloutConfig(prompts_per_step=PROMPTS_PER_STEP, max_new_tokens=60)
    sampler = Sampler(student, rollouts, seed=seed)
    tables, draw = TableTeachers(encoder), random.Random(seed)
    curve: list[dict[str, Any]] = []
    for step in range(steps):
        items = [exercise(number % teachers, draw) for number in range(PROMPTS_PER_STEP)]
        prompts = [Prompt(n, item.messages, {item.task: 1.0}) for n, item in enumerate(items)]
        if samples:
            completions = sampler.sample_batch(prompts, step=step, batch=0)
        else:
            pairs = zip(items, prompts, strict=True)
            completions = [right_rollout(student, encoder, *pair) for pair in pairs]
        examples = [tables.example(*pair) for pair in zip(items, completions, strict=True)]
        tokens = sum(len(rollout.completion) for rollout in completions)
        batches = pack(examples, tokens_per_micro_batch=16_384, average=average)
        learner.update(batches, tokens=tokens, step=step)
        if (step + 1) * 10 // steps > step * 10 // steps:
            curve.append({"step": step + 1, **accuracies(student, encoder, tables, teachers)})
    return curve


@torch.no_grad()
def accuracies(
    student: Student, encoder: Encoder, tables: TableTeachers, teachers: int
) -> dict[str, float]:
    """Return the share of prompts whose most likely tokens are all right, by kind of task."""
    draw, by_task = random.Random(0), list[float]()
    student.model.eval()
    for task in range(teachers):
        items = [exercise(task, draw) for _ in range(EVALUATED)]
        prompts = [Prompt(n, item.messages, {item.task: 1.0}) for n, item in enumerate(items)]
        rollouts = [
            right_rollout(student, encoder, *pair) for pair in zip(items, prompts, strict=True)
        ]
        pairs = zip(items, rollouts, strict=True)
        batch = micro_batch([tables.example(*pair) for pair in pairs])
        likeliest = student.completion_logits(batch).argmax(dim=1)
        right = likeliest == batch.input_ids[batch.slot_rows, batch.slot_columns + 1]
        wrong = torch.zeros(len(items)).index_add(0, batch.slot_rows, (~right).float())
        by_task.append(float((wrong == 0).float().mean()))
    return {
        "short": float(np.mean(by_task[::2])),
        "long": float(np.mean(by_task[1::2])),
        "mean": float(np.mean(by_task)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every average and number of teachers, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teachers", default="2,4,8", help="even numbers (default: 2,4,8)")
    parser.add_argument("--averages", default=",".join(AVERAGES))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--samples", action="store_true", help="train on the student's samples")
    parser.add_argument("--json", type=Path, help="save all curves")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console()
    table = Table(
        "teachers", "loss_average", "short", "long", "mean", "mean halfway", "s", box=None
    )
    results: list[dict[str, Any]] = []
    for teachers in map(int, options.teachers.split(",")):
        for average in options.averages.split(","):
            begun = time.process_time()
            curves = [
                run(teachers, average, steps=options.steps, seed=seed, samples=options.samples)
                for seed in range(options.seeds)
            ]
            seconds = time.process_time() - begun
            results.append({"teachers": teachers, "loss_average": average, "curves": curves})
            ends = [np.mean([c[-1][kind] for c in curves]) for kind in ("short", "long", "mean")]
            ends.append(np.mean([curve[len(curve) // 2 - 1]["mean"] for curve in curves]))
            cells = [f"{share:.1%}" for share in ends]
            console.print(teachers, average, *cells, f"{seconds:.0f} s")
            table.add_row(str(teachers), average, *cells, f"{seconds:.0f}")
            if options.json is not None:
                options.json.write_text(json.dumps(results))
    console.print(table)


if __name__ == "__main__":
    main()
