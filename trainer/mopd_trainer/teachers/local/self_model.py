"""``SelfModel``: the student as its own teacher, with initial, current, averaged or copied weights.

Rows are computed by the student's own forward pass, in the micro-batches in which it is trained, so
that a teacher with the student's weights and prompt has the student's distributions exactly.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mopd_losses.core.blockwise_head import Head
from mopd_protocol.samples import Message, Prompt, Rollout
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.packing import MicroBatch, pack
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.local.model import (
    LocalScore,
    LocalTask,
    ScoreOptions,
    candidates_of,
    empty_score,
    split_by_task,
)
from mopd_trainer.teachers.local.row_scores import LocalRowScores, concatenate, row_scores

#: Rows whose logits exist at once.
_ROWS_PER_BLOCK = 1_024
_PROMPT = Prompt(index=0, messages=(Message(role="user", content="-"),), teachers={})


class SelfModel:
    """A teacher with the student's weights (``live``) or a copy of the trained ones.

    Args:
        config: of the teacher; ``weights`` is set.
        student: with the weights of the start.
        tokens_per_batch: tokens of a micro-batch, as in training.
    """

    def __init__(self, config: TeacherConfig, student: Student, *, tokens_per_batch: int) -> None:
        self._config = config
        self._student = student
        self._scored = student if config.weights == "live" else student.copy()
        self._tokens_per_batch = tokens_per_batch
        # The parameters themselves where these are float32: small steps would round to zero.
        parameters = self._scored.trained() if self._changes else {}
        self._weights = {name: each.detach().float() for name, each in parameters.items()}

    @property
    def _changes(self) -> bool:
        return self._config.weights in ("average", "copy")

    @property
    def head(self) -> Head | None:
        """The head; its matrix is that of the weights at any time."""
        return self._scored.head

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Take in the student's weights after ``steps`` steps, also if the last was skipped.

        The average is ``a + rate * (w - a)`` in float32, once per step.
        """
        if not self._changes or (self._config.every and steps % self._config.every):
            return
        rate = 1.0 if self._config.rate is None else self._config.rate
        own = self._scored.trained()
        for name, parameter in self._student.trained().items():
            self._weights[name].lerp_(parameter.detach().float(), rate)
            own[name].copy_(self._weights[name])

    def state(self) -> dict[str, Tensor]:
        """Return the weights that a checkpoint needs, float32; none for ``start`` and ``live``."""
        return self._weights

    @torch.no_grad()
    def load_state(self, weights: Mapping[str, Tensor]) -> None:
        """Load what ``state`` returned.

        Raises:
            KeyError: if a weight is missing.
        """
        own = self._scored.trained()
        for name, value in self._weights.items():
            value.copy_(weights[name])
            own[name].copy_(value)

    @torch.no_grad()
    def score(self, tasks: Sequence[LocalTask], options: ScoreOptions) -> list[LocalScore]:
        """Return one score per task, in order; empty for a task without rows."""
        scores = [empty_score(options, task) for task in tasks]
        indices = [index for index, task in enumerate(tasks) if len(task.completion_ids)]
        examples = [_example(tasks[index]) for index in indices]
        self._scored.model.eval()
        budget, packed = self._tokens_per_batch, self._student.packs
        for batch in pack(examples, tokens_per_micro_batch=budget, packed=packed):
            members = [indices[index] for index in batch.examples]
            results = self._score_batch(batch, [tasks[index] for index in members], options)
            for index, score in zip(members, results, strict=True):
                scores[index] = score
        return scores

    def _score_batch(
        self, batch: MicroBatch, tasks: Sequence[LocalTask], options: ScoreOptions
    ) -> list[LocalScore]:
        device = self._scored.device
        ids = np.concatenate([task.completion_ids for task in tasks]).astype(np.int64)
        tokens = torch.from_numpy(ids).to(device)
        candidates = candidates_of(tasks, device)
        head = self.head
        rows = self._full_logits(batch) if head is None else self._scored.completion_rows(batch)
        parts: list[LocalRowScores] = []
        for start in range(0, len(rows), _ROWS_PER_BLOCK):
            block = slice(start, start + _ROWS_PER_BLOCK)
            part = row_scores(
                rows[block] if head is None else head.logits(rows[block]),
                tokens[block],
                top_k=options.top_k,
                candidates=None if candidates is None else candidates[block],
                temperature=options.temperature,
            )
            parts.append(part)
        hidden = rows.cpu() if options.hidden and head is not None else None
        return split_by_task(concatenate(parts), hidden, tasks, options)

    def _full_logits(self, batch: MicroBatch) -> Tensor:
        logits = self._scored.completion_logits(batch).float()
        real_ids = torch.from_numpy(self._scored.table.real_ids(logits.shape[1]))
        return logits.masked_fill(~real_ids.to(logits.device), -torch.inf)


def _example(task: LocalTask) -> TrainingExample:
    """Return tokens as packing takes them: a completion without bytes and scores."""
    count = len(task.completion_ids)
    completion = TokenSequence(task.completion_ids, np.zeros(count, dtype=np.int32), b"")
    rollout = Rollout(_PROMPT, task.prompt_ids, completion, None, "length", 0)
    return TrainingExample(rollout, ())
