"""``LocalModel``: a teacher's weights in this process, asleep on the CPU until they are needed.

Weights never change, so falling asleep copies nothing: what is on the accelerator is dropped, and
what lies in the CPU's memory is there all the time. On a CPU both are one and the same, and waking
is free.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mopd_losses.core.blockwise_head import Head
from mopd_protocol.arrays import IntArray
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.data.packing import batch_sizes
from mopd_trainer.student.output_head import output_head
from mopd_trainer.teachers.local.manifest import dtype_of, load
from mopd_trainer.teachers.local.row_scores import LocalRowScores, joined, row_scores

#: Rows whose logits exist at once: 256 rows of 150,000 ids are 150 MB.
_ROWS_PER_CHUNK = 256


@dataclass(frozen=True, eq=False)
class LocalTask:
    """A sequence in the teacher's tokens."""

    prompt_ids: IntArray  # [prompt tokens], at least one
    completion_ids: IntArray  # [rows]
    candidate_ids: list[list[int]] | None = None  # a list of distinct ids a row

    @property
    def read(self) -> int:
        """Tokens that the model reads: the last is predicted, never read."""
        return len(self.prompt_ids) + len(self.completion_ids) - 1


@dataclass(frozen=True)
class Question:
    """What is asked about every row."""

    top_k: int
    temperature: float = 1.0
    hidden: bool = False
    """Whether its hidden states are wanted too."""


@dataclass(frozen=True, eq=False)
class LocalScore:
    """A task's rows, on the CPU."""

    topk: TopKLogprobs
    hidden: Tensor | None  # [rows, hidden size], in the model's precision


class LocalModel:
    """Made awake, on its device; ``sleep`` and ``wake`` move it.

    Args:
        device: where it scores.
        tokens_per_batch: tokens that go through the model at once, padding counted.
    """

    def __init__(
        self, model: PreTrainedModel, table: TokenTable, device: torch.device, tokens_per_batch: int
    ) -> None:
        self._model: Any = model.eval().requires_grad_(False)
        self._device = device
        self._tokens_per_batch = tokens_per_batch
        tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
        self._homes = [(tensor, tensor.data) for tensor in tensors]
        self.awake = False
        self.wake()
        module: Any = model.get_output_embeddings()
        self._real_ids = torch.from_numpy(table.real_ids(len(module.weight))).to(device)
        self.head = output_head(model, table, self._real_ids)
        """Moves with the model; None where logits are more than a matrix product."""

    @classmethod
    def load(
        cls,
        name: str,
        config: TeacherConfig,
        table: TokenTable,
        device: torch.device,
        tokens_per_batch: int,
    ) -> "LocalModel":
        """Reads the weights; awake.

        Raises:
            ConfigError: when there is no such model.
        """
        assert config.model is not None  # its settings have been checked
        settings = load(name, config, partial(AutoConfig.from_pretrained, config.model))
        dtype = dtype_of(config, settings, device.type)
        read = partial(AutoModelForCausalLM.from_pretrained, config.model, dtype=dtype)
        model = load(name, config, read)
        return cls(model, table, device, tokens_per_batch)

    def wake(self) -> None:
        """Its weights come to the device; nothing where they are there."""
        for tensor, home in self._homes:
            tensor.data = home.to(self._device)
        self.awake = True

    def sleep(self) -> None:
        """Gives the device's memory back; its weights stay on the CPU."""
        for tensor, home in self._homes:
            tensor.data = home
        self.awake = False
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()

    @torch.no_grad()
    def score(self, tasks: Sequence[LocalTask], question: Question) -> list[LocalScore]:
        """One score a task, in their order; a task without rows has an empty one.

        Raises:
            RuntimeError: when it is asleep.
        """
        if not self.awake:
            raise RuntimeError("a teacher was asked in its sleep")
        longest_first = sorted(range(len(tasks)), key=lambda at: -tasks[at].read)
        asked = [at for at in longest_first if len(tasks[at].completion_ids)]
        found = {at: _nothing(question, tasks[at]) for at in longest_first}
        start = 0
        for size in batch_sizes([tasks[at].read for at in asked], self._tokens_per_batch):
            chosen = asked[start : start + size]
            scores = self._batch([tasks[at] for at in chosen], question)
            found |= dict(zip(chosen, scores, strict=True))
            start += size
        return [found[at] for at in range(len(tasks))]

    def _batch(self, tasks: Sequence[LocalTask], question: Question) -> list[LocalScore]:
        """Of tasks with rows, through the model together."""
        inputs = _Inputs.of(tasks, self._device)
        candidates = _candidates(tasks, self._device)
        parts: list[LocalRowScores] = []
        hidden = self._hidden(inputs) if self.head is not None else None
        logits = self._whole_logits(inputs) if hidden is None else None
        for start in range(0, len(inputs.tokens), _ROWS_PER_CHUNK):
            chunk = slice(start, start + _ROWS_PER_CHUNK)
            if hidden is not None and self.head is not None:
                rows = self.head.logits(hidden[chunk])
            else:
                assert logits is not None
                rows = logits[chunk]
            scores = row_scores(
                rows,
                inputs.tokens[chunk],
                top_k=question.top_k,
                candidates=None if candidates is None else candidates[chunk],
                temperature=question.temperature,
            )
            parts.append(scores)
        kept = hidden.cpu() if hidden is not None and question.hidden else None
        return _split(joined(parts), kept, tasks, question)

    def _hidden(self, inputs: "_Inputs") -> Tensor:
        """[rows, hidden size]."""
        output = self._model.base_model(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, use_cache=False
        )
        return output.last_hidden_state[inputs.row_tasks, inputs.row_positions]

    def _whole_logits(self, inputs: "_Inputs") -> Tensor:
        """[rows, width], of one task after the other."""
        rows: list[Tensor] = []
        for task, mask in enumerate(inputs.attention_mask):
            read = inputs.input_ids[task : task + 1, : int(mask.sum())]
            logits = self._model(read, use_cache=False).logits[0].float()
            rows.append(logits[inputs.row_positions[inputs.row_tasks == task]])
        return torch.cat(rows).masked_fill_(~self._real_ids, -torch.inf)


def head_on(head: Head, device: torch.device) -> Head:
    """A head that stays on a device; shares the memory of one that is there."""
    bias = None if head.bias is None else head.bias.detach().to(device)
    return Head(
        head.weight.detach().to(device), head.real_ids.to(device), bias, head.scale, head.soft_cap
    )


@dataclass(frozen=True, eq=False)
class _Inputs:
    """Tasks padded on the right, and which positions predict completion tokens."""

    input_ids: Tensor  # [tasks, longest]
    attention_mask: Tensor  # [tasks, longest]
    row_tasks: Tensor  # [rows]
    row_positions: Tensor  # [rows]
    tokens: Tensor  # [rows], what really is there

    @classmethod
    def of(cls, tasks: Sequence[LocalTask], device: torch.device) -> "_Inputs":
        """The one place where the shift is applied: completion token ``r`` is predicted at
        position ``prompt length + r - 1``."""
        input_ids = np.zeros((len(tasks), max(task.read for task in tasks)), dtype=np.int64)
        attention_mask = np.zeros_like(input_ids)
        for row, task in enumerate(tasks):
            read = np.concatenate([task.prompt_ids, task.completion_ids])[:-1]
            input_ids[row, : task.read] = read
            attention_mask[row, : task.read] = 1
        rows = [len(task.completion_ids) for task in tasks]
        positions = [len(t.prompt_ids) - 1 + np.arange(len(t.completion_ids)) for t in tasks]
        tokens = np.concatenate([task.completion_ids for task in tasks]).astype(np.int64)
        arrays = (
            input_ids,
            attention_mask,
            np.repeat(np.arange(len(tasks)), rows),
            np.concatenate(positions),
            tokens,
        )
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


def _candidates(tasks: Sequence[LocalTask], device: torch.device) -> Tensor | None:
    """[rows, widest], -1 where a row has fewer; None where teachers say what they like."""
    if tasks[0].candidate_ids is None:
        return None
    rows = [row for task in tasks for row in task.candidate_ids or []]
    padded = np.full((len(rows), max(map(len, rows))), ABSENT_ID, dtype=np.int64)
    for at, row in enumerate(rows):
        padded[at, : len(row)] = row
    return torch.from_numpy(padded).to(device)


def _split(
    scores: LocalRowScores, hidden: Tensor | None, tasks: Sequence[LocalTask], question: Question
) -> list[LocalScore]:
    """Each task's rows, as wide as it asked: its company must not show in its answer."""
    found: list[LocalScore] = []
    start = 0
    for task in tasks:
        rows = slice(start, start + len(task.completion_ids))
        topk = scores.part(rows, _width(question, task))
        # A copy of its own: a slice would keep the whole batch alive.
        found.append(LocalScore(topk, None if hidden is None else hidden[rows].clone()))
        start = rows.stop
    return found


def _width(question: Question, task: LocalTask) -> int:
    rows = task.candidate_ids
    return question.top_k if rows is None else max(map(len, rows), default=0)


def _nothing(question: Question, task: LocalTask) -> LocalScore:
    k = _width(question, task)
    empty = np.zeros(0, dtype=np.float32)
    topk = TopKLogprobs(
        ids=np.zeros((0, k), dtype=np.int32),
        logprobs=np.zeros((0, k), dtype=np.float32),
        token_logprobs=empty,
        tail_logprobs=empty,
    )
    return LocalScore(topk, torch.zeros((0, 0)) if question.hidden else None)
