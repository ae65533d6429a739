"""A tiny student and its training: on right completions, on its own samples, with any teacher.

The tasks are sums of two digits, and differences (100 prompts each, completions of 2 or 3 tokens),
of ``bench.loss_average``. A teacher is a table, or the student of an earlier time.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.loss_average import TableTeachers, exercise, right_rollout
from bench.numerals.numeral_tokenizers import digit_tokenizer
from bench.numerals.pairs import STUDENT_NAMES
from mopd.demo.examples import Encoder
from mopd.demo.models import build_model
from mopd.demo.tasks import Exercise
from mopd_losses import Loss, build_loss
from mopd_losses.alignment.byte_alignment import identity_alignment
from mopd_losses.config import LossConfig
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
from mopd_trainer.data.examples import AlignedScore
from mopd_trainer.data.teacher_input import token_view

PROMPTS_PER_STEP = 32
LEARNING_RATE = 2e-3
TEACHER = "teacher"

#: Score completions of exercises.
Score = Callable[[Sequence[Exercise], Sequence[Rollout]], list[TrainingExample]]


@dataclass(eq=False)
class Subject:
    """A student with its tokenizer's encoder."""

    student: Student
    encoder: Encoder

    @classmethod
    def of(cls, seed: int) -> "Subject":
        """Return a student with random weights."""
        tokenizer = digit_tokenizer(STUDENT_NAMES)
        model = build_model("qwen3", tokenizer, seed)
        return cls(Student(model, tokenizer, torch.device("cpu")), Encoder(tokenizer))

    def copy(self) -> "Subject":
        """Return a copy of the student."""
        return Subject(self.student.copy(), self.encoder)

    def right(self, item: Exercise, prompt: Prompt) -> Rollout:
        """Return the right completion of an exercise as a rollout."""
        return right_rollout(self.student, self.encoder, item, prompt)

    @torch.no_grad()
    def accuracy(self, task: int) -> float:
        """Return the share of a task's prompts whose most likely tokens are all right."""
        items = [exercise(task, draw) for draw in [random.Random(7)] for _ in range(100)]
        prompts = [Prompt(n, item.messages, {TEACHER: 1.0}) for n, item in enumerate(items)]
        rollouts = [self.right(*pair) for pair in zip(items, prompts, strict=True)]
        tables = TableTeachers(self.encoder)
        pairs = zip(items, rollouts, strict=True)
        batch = micro_batch([tables.example(*pair) for pair in pairs])
        self.student.model.eval()
        likeliest = self.student.completion_logits(batch).argmax(dim=1)
        right = likeliest == batch.input_ids[batch.slot_rows, batch.slot_columns + 1]
        wrong = torch.zeros(len(items)).index_add(0, batch.slot_rows, (~right).float())
        return float((wrong == 0).float().mean())


def table_score(subject: Subject) -> Score:
    """Score with a table that gives nine tenths to the right token of each position."""
    tables = TableTeachers(subject.encoder)

    def score(items: Sequence[Exercise], rollouts: Sequence[Rollout]) -> list[TrainingExample]:
        examples = [tables.example(*pair) for pair in zip(items, rollouts, strict=True)]
        return [replace(e, scores=(replace(e.scores[0], teacher=TEACHER),)) for e in examples]

    return score


def self_score(teachers: Mapping[int, Subject], top_k: int) -> Score:
    """Score completions with students of an earlier time, by task."""

    @torch.no_grad()
    def score(items: Sequence[Exercise], rollouts: Sequence[Rollout]) -> list[TrainingExample]:
        examples: dict[int, TrainingExample] = {}
        for task, teacher in teachers.items():
            chosen = [n for n, item in enumerate(items) if item.task == f"task{task}"]
            if not chosen:
                continue
            pairs = [items[n] for n in chosen], [rollouts[n] for n in chosen]
            batch = micro_batch(table_score(teacher)(*pairs))
            teacher.student.model.eval()
            logits = teacher.student.completion_logits(batch).float()
            real = torch.tensor(teacher.student.table.real_ids(logits.shape[1]))
            rows = logits.masked_fill(~real, -torch.inf).log_softmax(dim=1)
            for place, (n, start) in enumerate(
                zip(chosen, batch.teachers[TEACHER].slot_offsets, strict=True)
            ):
                rollout = pairs[1][place]
                own = rows[start : start + len(rollout.completion)]
                examples[n] = aligned_example(rollout, _topk(own, rollout, top_k))
        return [examples[n] for n in range(len(items))]

    return score


def _topk(rows: Tensor, rollout: Rollout, top_k: int) -> TopKLogprobs:
    logprobs, ids = rows.topk(top_k, dim=1)
    labels = torch.tensor(rollout.completion.token_ids, dtype=torch.int64)
    tokens = rows.gather(1, labels[:, None])[:, 0]
    tail = (1 - logprobs.double().exp().sum(dim=1)).clamp_min(1e-12).log().float()
    return TopKLogprobs(*(each.numpy() for each in (ids, logprobs, tokens, tail)))


def aligned_example(rollout: Rollout, topk: TopKLogprobs) -> TrainingExample:
    """Return an example with one score of the student's tokens."""
    score = TeacherScore("0" * 32, rollout.completion, topk)
    alignment = identity_alignment(len(rollout.completion))
    aligned = AlignedScore(TEACHER, 1.0, token_view(rollout), score, alignment)
    return TrainingExample(rollout, (aligned,))


def train(
    subject: Subject,
    tasks: Sequence[int],
    score: Score,
    loss: LossConfig,
    *,
    steps: int,
    seed: int,
    on_policy: bool = True,
    learning_rate: float = LEARNING_RATE,
    observe: Callable[[int, dict[str, Any]], object] | None = None,
) -> None:
    """Train on samples of the student, or on right completions.

    Args:
        observe: called after each step with the steps done and the step's metrics.
    """
    student = subject.student
    built: Loss = build_loss(loss, student.identity, student.identity, "cpu")
    config = StudentConfig(model="tiny", learning_rate=learning_rate, warmup_steps=10)
    learner = Learner(
        student,
        config,
        losses={TEACHER: built},
        teacher_weights={TEACHER: 1.0},
        max_steps=steps,
        seed=seed,
    )
    rollouts = RolloutConfig(prompts_per_step=PROMPTS_PER_STEP, max_new_tokens=4)
    sampler = Sampler(student, rollouts, seed=seed)
    draw = random.Random(seed)
    for step in range(steps):
        items = [exercise(tasks[n % len(tasks)], draw) for n in range(PROMPTS_PER_STEP)]
        prompts = [Prompt(n, item.messages, {TEACHER: 1.0}) for n, item in enumerate(items)]
        if on_policy:
            completions = sampler.sample_batch(prompts, step=step, batch=0)
        else:
            pairs = zip(items, prompts, strict=True)
            completions = [subject.right(*pair) for pair in pairs]
        examples = score(items, completions)
        tokens = int(np.sum([len(each.completion) for each in completions]))
        metrics, _ = learner.update(
            pack(examples, tokens_per_micro_batch=16_384), tokens=tokens, step=step
        )
        if observe is not None:
            observe(step + 1, metrics)
