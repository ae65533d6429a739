"""Tiny students: exercises, teachers that are tables or other students, and training.

A teacher is named by its task. Even tasks have completions of one or two digits (arithmetic on two
digits), odd ones of 42 to 57 (three digits, continued with a step). Task
``CHAIN + n`` has completions of ``n`` digits, each one more than the third last one.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from bench.numerals.numeral_tokenizers import digit_tokenizer
from bench.numerals.pairs import STUDENT_NAMES
from bench.numerals.reference_rollouts import reference_rollouts
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
from mopd_trainer.config.settings import LossAverage
from mopd_trainer.data.examples import AlignedScore
from mopd_trainer.data.teacher_input import token_view

PROMPTS_PER_STEP = 32
LEARNING_RATE = 2e-3
CONFIDENCE = 0.9  # of a table in the right token
CHAIN = 1_000

_ARITHMETIC: Sequence[Callable[[int, int], int]] = (
    lambda a, b: a + b,
    lambda a, b: abs(a - b),
    lambda a, b: a * b,
    lambda a, b: 2 * a + b,
)

#: Score completions of exercises.
Score = Callable[[Sequence[Exercise], Sequence[Rollout]], list[TrainingExample]]
#: Return the completions that a step trains on.
Source = Callable[[Sequence[Exercise], Sequence[Prompt], int], list[Rollout]]


def exercise(task: int, draw: random.Random) -> Exercise:
    """Return a prompt of a task and its right completion."""
    kind, digits = task // 2, [draw.randrange(10) for _ in range(3)]
    if task < CHAIN and task % 2 == 0:
        completion = str(_ARITHMETIC[kind](digits[0], digits[1]))
        return Exercise(teacher_name(task), f"{task}{digits[0]}{digits[1]}", tuple(completion))
    prompt, chain = "".join(map(str, digits)), task > CHAIN
    for position in range(3, 3 + task - CHAIN if chain else 41 + 5 * kind):
        digits.append((digits[position - 3] + (1 if chain else kind + 1)) % 10)
    if chain:
        return Exercise(teacher_name(task), prompt, tuple(map(str, digits[3:])))
    return Exercise(teacher_name(task), f"{task}{prompt}", tuple(map(str, digits)))


def teacher_name(task: int) -> str:
    """Return the name of a task's teacher."""
    return f"task{task}"


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

    def right(
        self, items: Sequence[Exercise], prompts: Sequence[Prompt], step: int = 0
    ) -> list[Rollout]:
        """Return the right completions, as if they had been sampled."""
        return reference_rollouts(self.student, self.encoder, items, prompts, step)

    def accuracy(self, task: int, count: int = 100) -> float:
        """Return the share of a task's prompts whose greedy completion is right."""
        return self.accuracies(task, count)[0]

    @torch.no_grad()
    def accuracies(self, task: int, count: int = 100) -> tuple[float, float]:
        """Return the share of prompts whose most likely tokens are all right, and the mean
        probability that a sampled completion is right."""
        draw = random.Random(7)
        items = [exercise(task, draw) for _ in range(count)]
        batch = micro_batch(table_score(self)(items, self.right(items, prompts_of(items))))
        self.student.model.eval()
        rows = self._logprobs(batch)
        expected = batch.input_ids[batch.slot_rows, batch.slot_columns + 1]
        zeros = torch.zeros(len(items))
        wrong = zeros.index_add(0, batch.slot_rows, (rows.argmax(dim=1) != expected).float())
        chosen = rows.gather(1, expected[:, None])[:, 0]
        sampled = zeros.index_add(0, batch.slot_rows, chosen).exp()
        return float((wrong == 0).float().mean()), float(sampled.mean())

    def _logprobs(self, batch: Any) -> Tensor:
        """Return log-probabilities of the tokenizer's ids [slots, ids]."""
        logits = self.student.completion_logits(batch).float()
        real = torch.tensor(self.student.table.real_ids(logits.shape[1]))
        return logits.masked_fill(~real, -torch.inf).log_softmax(dim=1)

    @torch.no_grad()
    def topk(self, examples: Sequence[TrainingExample], top_k: int) -> list[TopKLogprobs]:
        """Return this student's most likely tokens for the completions of examples."""
        batch = micro_batch(list(examples))
        self.student.model.eval()
        rows = self._logprobs(batch)
        lengths = [len(each.rollout.completion) for each in examples]
        labels = batch.input_ids[batch.slot_rows, batch.slot_columns + 1]
        logprobs, ids = rows.topk(top_k, dim=1)
        tokens = rows.gather(1, labels[:, None])[:, 0]
        tail = (1 - logprobs.double().exp().sum(dim=1)).clamp_min(1e-12).log().float()
        parts = [each.split(lengths) for each in (ids, logprobs, tokens, tail)]
        return [TopKLogprobs(*(each.numpy() for each in four)) for four in zip(*parts, strict=True)]


def prompts_of(items: Sequence[Exercise]) -> list[Prompt]:
    """Return the prompts of exercises, each with its task as the teacher."""
    return [Prompt(n, item.messages, {item.task: 1.0}) for n, item in enumerate(items)]


def table_score(subject: Subject) -> Score:
    """Score with a table: 0.9 for the right token of each position after any prefix, the rest for
    other digits."""
    digits = [subject.encoder.part(str(digit))[0] for digit in range(10)]

    def topk(item: Exercise, rollout: Rollout) -> TopKLogprobs:
        right, count = subject.encoder.completion(item), len(rollout.completion)
        expected = [*right, *[right[-1]] * count][:count]
        others = [[digit for digit in digits if digit != token][:3] for token in expected]
        ids = np.array([[t, *rest] for t, rest in zip(expected, others, strict=True)], np.int32)
        masses = np.array([CONFIDENCE, *[(1 - CONFIDENCE) / 4] * 3])
        logprobs = np.log(np.tile(masses, (count, 1))).astype(np.float32)
        tail = np.full(count, np.log((1 - CONFIDENCE) / 4), dtype=np.float32)
        own = rollout.completion.token_ids[:, None] == ids
        tokens = np.where(own.any(axis=1), (logprobs * own).sum(axis=1), tail)
        return TopKLogprobs(ids, logprobs, tokens, tail)

    return lambda items, rollouts: [
        aligned_example(rollout, topk(item, rollout), item.task)
        for item, rollout in zip(items, rollouts, strict=True)
    ]


def model_score(teachers: Mapping[int, Subject], top_k: int) -> Score:
    """Score completions with other students, by task."""

    def score(items: Sequence[Exercise], rollouts: Sequence[Rollout]) -> list[TrainingExample]:
        examples: dict[int, TrainingExample] = {}
        for task, teacher in teachers.items():
            chosen = [n for n, item in enumerate(items) if item.task == teacher_name(task)]
            if chosen:
                own = [token_example(rollouts[n], teacher_name(task)) for n in chosen]
                for n, topk in zip(chosen, teacher.topk(own, top_k), strict=True):
                    examples[n] = aligned_example(rollouts[n], topk, teacher_name(task))
        return [examples[n] for n in range(len(items))]

    return score


def token_example(
    rollout: Rollout, teacher: str, logprobs: np.ndarray[Any, Any] | None = None
) -> TrainingExample:
    """Return an example with one entry per row, the completion's token, almost certain by default:
    forward KL is then cross entropy."""
    count = len(rollout.completion)
    chosen = np.full(count, -1e-6, np.float32) if logprobs is None else np.float32(logprobs)
    rest = np.log(-np.expm1(np.minimum(chosen, -1e-6).astype(np.float64))).astype(np.float32)
    ids = rollout.completion.token_ids[:, None]
    topk = TopKLogprobs(ids, chosen[:, None], chosen, rest)
    return aligned_example(rollout, topk, teacher)


def aligned_example(rollout: Rollout, topk: TopKLogprobs, teacher: str) -> TrainingExample:
    """Return an example with one score of the student's tokens."""
    score = TeacherScore("0" * 32, rollout.completion, topk)
    alignment = identity_alignment(len(rollout.completion))
    aligned = AlignedScore(teacher, 1.0, token_view(rollout), score, alignment)
    return TrainingExample(rollout, (aligned,))


def train(
    subject: Subject,
    tasks: Sequence[int],
    score: Score,
    loss: LossConfig | Loss,
    *,
    steps: int,
    seed: int,
    source: Source | None = None,
    group: int = 1,
    max_new_tokens: int = 4,
    average: LossAverage = "tokens",
    learning_rate: float = LEARNING_RATE,
    observe: Callable[[int, dict[str, Any]], object] | None = None,
) -> None:
    """Train on samples of the student, or on completions of a source.

    Args:
        group: samples per prompt.
        observe: called after each step with the steps done and the step's metrics.
    """
    student, names = subject.student, [teacher_name(task) for task in tasks]
    if isinstance(loss, BaseModel):
        loss = build_loss(loss, student.identity, student.identity, "cpu")
    config = StudentConfig(model="tiny", learning_rate=learning_rate, warmup_steps=10)
    learner = Learner(
        student,
        config,
        losses=dict.fromkeys(names, loss),
        teacher_weights=dict.fromkeys(names, 1.0),
        max_steps=steps,
        seed=seed,
    )
    rollouts = RolloutConfig(
        prompts_per_step=PROMPTS_PER_STEP, max_new_tokens=max_new_tokens, temperature=1.0
    )
    sampler = Sampler(student, rollouts, seed=seed)
    draw = random.Random(seed)
    for step in range(steps):
        items = [exercise(tasks[n % len(tasks)], draw) for n in range(PROMPTS_PER_STEP // group)]
        items = [item for item in items for _ in range(group)]
        prompts = prompts_of(items)
        if source is None:
            completions = sampler.sample_batch(prompts, step=step, batch=0)
        else:
            completions = source(items, prompts, step)
        examples = score(items, completions)
        batches = pack(examples, tokens_per_micro_batch=16_384, average=average)
        tokens = sum(len(each.completion) for each in completions)
        metrics, _ = learner.update(batches, tokens=tokens, step=step)
        if observe is not None:
            observe(step + 1, metrics)
