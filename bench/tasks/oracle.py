"""Positions at which a loss pushes the student away from the correct token.

The reference is a model of the same task with the student's own tokenizer (the ceiling). On a text,
its likeliest next token is the target; the gradient of a loss with respect to the target's logit
should exceed neither zero nor ``p(target) - ceiling(target)``, the gradient of KL from the ceiling.
What exceeds both is the *excess*; a target with an excess above ``THRESHOLD`` is pushed down. A
target that the ceiling prefers by more than ``CLEAR`` and whose gradient is within ``THRESHOLD`` of
zero is *ignored*: the loss does not see the mistake.

Texts are the teacher's greedy completions and the student's samples. Beliefs, the logits at which
the gradient is taken, are the student's (warm, or of the finished run: ``distilled``), the
ceiling's, and ``equal``: 0.999 for each token of the text. Two models that agree about a text
should have no loss, so the nats of ``ceiling`` and ``equal`` on the teacher's texts are false.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bench.numerals.distillation import (
    ReferenceSampler,
    Run,
    connected_teachers,
    loss_of,
    student_config,
    student_folder,
)
from bench.numerals.material import model_folder
from mopd.demo.examples import Encoder
from mopd.demo.tasks import Exercise
from mopd_losses import DenseRows, Loss, ProjectionCache
from mopd_protocol import Prompt, Rollout, TokenSequence, TokenTable
from mopd_trainer import (
    MicroBatch,
    RolloutConfig,
    RolloutScorer,
    Sampler,
    Student,
    TrainingExample,
    pack,
)

Text = Literal["completions", "samples"]
Belief = Literal["equal", "ceiling", "student"]
BELIEFS: tuple[Belief, ...] = ("equal", "ceiling", "student")

THRESHOLD = 0.1  # nats per unit of logit
CLEAR = 0.5  # probability
_CONFIDENCE = 0.999
_TOKENS_PER_MICRO_BATCH = 4_096


@dataclass(frozen=True)
class Push:
    """One position of one text."""

    task: str
    text: Text
    belief: Belief
    prompt: str
    student_tokens: tuple[str, ...]
    teacher_tokens: tuple[str, ...]
    position: int
    target: str
    probability: float  # of the target, at the belief
    ceiling: float  # the same of the ceiling
    gradient: float
    nats: float

    @property
    def excess(self) -> float:
        """See the module."""
        return self.gradient - max(0.0, self.probability - self.ceiling)

    @property
    def ignored(self) -> bool:
        """See the module."""
        return self.ceiling - self.probability > CLEAR and self.gradient > -THRESHOLD


def measure(run: Run, models: Path, prompts: int, *, distilled: bool = False) -> list[Push]:
    """Return every position of the texts of ``prompts`` held-out prompts per task."""
    return asyncio.run(_measure(run, models, prompts, distilled))


def summary(pushes: Sequence[Push]) -> list[dict[str, Any]]:
    """Return nats per token, and the share of tokens that are pushed down, by kind."""
    kinds = dict.fromkeys((push.task, push.text, push.belief) for push in pushes)
    rows: list[dict[str, Any]] = []
    for task, text, belief in kinds:
        chosen = [p for p in pushes if (p.task, p.text, p.belief) == (task, text, belief)]
        rows.append(
            {
                "task": task,
                "text": text,
                "belief": belief,
                "tokens": len(chosen),
                "nats_per_token": float(np.mean([push.nats for push in chosen])),
                "pushed_down": float(np.mean([push.excess > THRESHOLD for push in chosen])),
                "ignored": float(np.mean([push.ignored for push in chosen])),
                "worst": asdict(max(chosen, key=lambda push: push.excess)),
            }
        )
    return rows


async def _measure(run: Run, models: Path, count: int, distilled: bool) -> list[Push]:
    start = model_folder(run.pair.student, "student", run.seed, models)
    student = _load(run, student_folder(run, models) if distilled else start, models)
    cache = ProjectionCache()
    pushes: list[Push] = []
    async with connected_teachers(run, student, models, cache) as (pool, teachers):
        scorer = RolloutScorer(pool, teachers, student.table)
        for name, task in run.pair.tasks.items():
            folder = model_folder(run.pair.ceiling[name], "teacher", 0, models)
            source = _Source(
                run,
                name,
                student,
                _load(run, folder, models),
                loss_of(run, student, teachers[name], cache),
                teachers[name].tokenizer.table,
            )
            exercises = task.held_out()[:count]
            for text, rollouts in source.rollouts(exercises, models).items():
                examples = await scorer.score(rollouts)
                for batch in pack(examples, tokens_per_micro_batch=_TOKENS_PER_MICRO_BATCH):
                    pushes += source.pushes(text, batch, examples)
    return pushes


def _load(run: Run, folder: Path, models: Path) -> Student:
    """Load a model like the run's student."""
    return Student.load(student_config(run, models).model_copy(update={"model": str(folder)}))


@dataclass(frozen=True)
class _Source:
    """One teacher's task with the models that are compared on it."""

    run: Run
    name: str
    student: Student
    ceiling: Student
    loss: Loss
    teacher: TokenTable

    def rollouts(self, exercises: Sequence[Exercise], models: Path) -> dict[Text, list[Rollout]]:
        """Return the teacher's greedy completions, and the student's samples, as rollouts."""
        side = self.run.teachers[self.name]
        teacher = _load(self.run, model_folder(side, "teacher", 0, models), models)
        config = RolloutConfig(
            generation_batch_size=len(exercises),
            max_new_tokens=side.max_new_tokens,
            temperature=1.0,
        )
        greedy = Sampler(teacher, config.model_copy(update={"temperature": 0.0}), seed=0)
        completions = [
            Exercise(exercise.task, exercise.prompt, (rollout.completion.text.decode(),))
            for exercise, rollout in zip(
                exercises,
                greedy.sample_batch(self._prompts(exercises), step=0, batch=0),
                strict=True,
            )
            if rollout.completion.ends_turn
        ]
        encoder = Encoder(self.run.pair.student.tokenizer())
        written = ReferenceSampler(self.student, config, encoder, completions)
        sampled = Sampler(self.student, config, seed=0)
        return {
            "completions": written.sample_batch(self._prompts(completions), step=0, batch=0),
            "samples": sampled.sample_batch(self._prompts(exercises), step=0, batch=0),
        }

    def _prompts(self, exercises: Sequence[Exercise]) -> list[Prompt]:
        return [
            Prompt(index=index, messages=exercise.messages, teachers={self.name: 1.0})
            for index, exercise in enumerate(exercises)
        ]

    def pushes(
        self, text: Text, batch: MicroBatch, examples: Sequence[TrainingExample]
    ) -> list[Push]:
        """Return every position of a micro-batch, for every belief."""
        real_ids = torch.tensor(self.student.table.real_ids(self.student.identity.logit_width))
        chosen = [examples[index] for index in batch.examples]
        ids = np.concatenate([e.rollout.completion.token_ids for e in chosen]).astype(np.int64)
        with torch.no_grad():
            ceiling = self._probabilities(self.ceiling.completion_logits(batch), real_ids)
            logits = {
                "ceiling": self.ceiling.completion_logits(batch).float(),
                "student": self.student.completion_logits(batch).float(),
            }
        if text == "completions":
            targets = torch.from_numpy(ids)
            logits["equal"] = self._equal(targets, int(real_ids.sum()), ceiling.shape[1])
        else:
            targets = ceiling.argmax(dim=1)
        part = batch.teachers[self.name]
        listed: list[Push] = []
        for belief in BELIEFS:
            if belief not in logits:
                continue
            rows = logits[belief].requires_grad_()
            nats = self.loss(
                DenseRows(rows, real_ids), self.loss.targets(part.comparisons, part.slot_offsets)
            ).per_token
            nats.sum().backward()
            at = torch.arange(len(targets)), targets
            assert rows.grad is not None
            columns = [
                rows.grad[at],
                self._probabilities(rows.detach(), real_ids)[at],
                ceiling[at],
                nats,
            ]
            gradients, probabilities, references, losses = (c.detach().tolist() for c in columns)
            slot = 0
            for example in chosen:
                pieces = _pieces(example.rollout.completion, self.student.table)
                scored = _pieces(example.scores[0].score.completion, self.teacher)
                for position in range(len(pieces)):
                    listed.append(
                        Push(
                            task=self.name,
                            text=text,
                            belief=belief,
                            prompt=example.rollout.prompt.messages[0].content,
                            student_tokens=pieces,
                            teacher_tokens=scored,
                            position=position,
                            target=_piece(int(targets[slot]), self.student.table),
                            probability=probabilities[slot],
                            ceiling=references[slot],
                            gradient=gradients[slot],
                            nats=losses[slot],
                        )
                    )
                    slot += 1
        return listed

    def _probabilities(self, logits: Tensor, real_ids: Tensor) -> Tensor:
        return logits.float().masked_fill(~real_ids, -torch.inf).softmax(dim=1)

    def _equal(self, ids: Tensor, size: int, width: int) -> Tensor:
        """Return logits [tokens, width] that give each token 0.999."""
        logits = torch.full((len(ids), width), math.log((1 - _CONFIDENCE) / (size - 1)))
        logits[torch.arange(len(ids)), ids] = math.log(_CONFIDENCE)
        return logits


def _pieces(sequence: TokenSequence, table: TokenTable) -> tuple[str, ...]:
    return tuple(_piece(int(token_id), table) for token_id in sequence.token_ids)


def _piece(token_id: int, table: TokenTable) -> str:
    """Return a token's text, or the name of a control token."""
    if token_id < table.size and table.all_bytes[token_id]:
        return table.all_bytes[token_id].decode("utf-8", "backslashreplace")
    names = {each: name for name, each in table.controls.items()}
    return names.get(token_id, f"<{token_id}>")
