"""``LocalModel``: an in-process teacher model, offloaded to the CPU while idle.

Weights never change, so offloading copies nothing: the copy on the accelerator is dropped, the one
in CPU memory remains. On a CPU both are the same memory.
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
from mopd_protocol.runtime.model_weights import load_complete
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.data.packing import batch_sizes
from mopd_trainer.student.output_head import output_head
from mopd_trainer.teachers.local.manifest import dtype_of, load
from mopd_trainer.teachers.local.row_scores import LocalRowScores, concatenate, row_scores

#: Rows whose logits exist at once: 256 rows of 150,000 ids are 150 MB.
_ROWS_PER_CHUNK = 256


@dataclass(frozen=True, eq=False)
class LocalTask:
    """A sequence in the teacher's tokens."""

    prompt_ids: IntArray  # [prompt tokens], at least one
    completion_ids: IntArray  # [rows]
    candidate_ids: tuple[IntArray, ...] | None = None  # distinct ids, per row

    @property
    def input_tokens(self) -> int:
        """Number of input tokens: the last token is predicted, never an input."""
        return len(self.prompt_ids) + len(self.completion_ids) - 1


@dataclass(frozen=True)
class ScoreOptions:
    """Values to return for every row."""

    top_k: int
    temperature: float = 1.0
    hidden: bool = False
    """Return hidden states too."""


@dataclass(frozen=True, eq=False)
class LocalScore:
    """The rows of a task, on the CPU."""

    topk: TopKLogprobs
    hidden: Tensor | None  # [rows, hidden size], in the model's precision


class LocalModel:
    """A model on its device; ``offload`` and ``load_weights`` move its weights.

    Args:
        device: for scoring.
        tokens_per_batch: tokens of one forward pass, padding included.
    """

    def __init__(
        self, model: PreTrainedModel, table: TokenTable, device: torch.device, tokens_per_batch: int
    ) -> None:
        self._model: Any = model.eval().requires_grad_(False)
        self._device = device
        self._tokens_per_batch = tokens_per_batch
        tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
        self._cpu_tensors = [(tensor, tensor.data) for tensor in tensors]
        self.loaded = False
        self.load_weights()
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
        """Load the weights on the device.

        Raises:
            ConfigError: when the model does not exist.
            WeightsError: when weights are missing, unexpected or of another shape.
        """
        assert config.model is not None  # checked with the settings
        settings = load(name, config, partial(AutoConfig.from_pretrained, config.model))
        dtype = dtype_of(config, settings, device.type)
        from_pretrained = partial(
            load_complete,
            f"teacher {name!r}: model {config.model!r}",
            AutoModelForCausalLM.from_pretrained,
            config.model,
            dtype=dtype,
        )
        model = load(name, config, from_pretrained)
        return cls(model, table, device, tokens_per_batch)

    def load_weights(self) -> None:
        """Move the weights to the device (no-op if loaded)."""
        for tensor, on_cpu in self._cpu_tensors:
            tensor.data = on_cpu.to(self._device)
        self.loaded = True

    def offload(self) -> None:
        """Free the device's memory; the weights stay in CPU memory."""
        for tensor, on_cpu in self._cpu_tensors:
            tensor.data = on_cpu
        self.loaded = False
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()

    @torch.no_grad()
    def score(self, tasks: Sequence[LocalTask], options: ScoreOptions) -> list[LocalScore]:
        """Return one score per task, in order; empty for a task without rows.

        Raises:
            RuntimeError: when the weights are offloaded.
        """
        if not self.loaded:
            raise RuntimeError("a local teacher cannot score while its weights are offloaded")
        longest_first = sorted(range(len(tasks)), key=lambda index: -tasks[index].input_tokens)
        nonempty = [index for index in longest_first if len(tasks[index].completion_ids)]
        scores = {index: empty_score(options, tasks[index]) for index in longest_first}
        lengths = [tasks[index].input_tokens for index in nonempty]
        start = 0
        for size in batch_sizes(lengths, self._tokens_per_batch):
            indices = nonempty[start : start + size]
            batch = self._score_batch([tasks[index] for index in indices], options)
            scores |= dict(zip(indices, batch, strict=True))
            start += size
        return [scores[index] for index in range(len(tasks))]

    def _score_batch(self, tasks: Sequence[LocalTask], options: ScoreOptions) -> list[LocalScore]:
        """Score tasks with rows in one forward pass."""
        inputs = _Inputs.of(tasks, self._device)
        candidates = candidates_of(tasks, self._device)
        parts: list[LocalRowScores] = []
        hidden = self._hidden(inputs) if self.head is not None else None
        logits = self._full_logits(inputs) if hidden is None else None
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
                top_k=options.top_k,
                candidates=None if candidates is None else candidates[chunk],
                temperature=options.temperature,
            )
            parts.append(scores)
        kept = hidden.cpu() if hidden is not None and options.hidden else None
        return split_by_task(concatenate(parts), kept, tasks, options)

    def _hidden(self, inputs: "_Inputs") -> Tensor:
        """Return [rows, hidden size]."""
        output = self._model.base_model(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, use_cache=False
        )
        return output.last_hidden_state[inputs.row_tasks, inputs.row_positions]

    def _full_logits(self, inputs: "_Inputs") -> Tensor:
        """Return [rows, width], task by task."""
        rows: list[Tensor] = []
        for task, mask in enumerate(inputs.attention_mask):
            input_ids = inputs.input_ids[task : task + 1, : int(mask.sum())]
            logits = self._model(input_ids, use_cache=False).logits[0].float()
            rows.append(logits[inputs.row_positions[inputs.row_tasks == task]])
        return torch.cat(rows).masked_fill_(~self._real_ids, -torch.inf)


def head_on(head: Head, device: torch.device) -> Head:
    """Return the head on a device; shares memory if it is on the device already."""
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
    tokens: Tensor  # [rows], the completion tokens

    @classmethod
    def of(cls, tasks: Sequence[LocalTask], device: torch.device) -> "_Inputs":
        """Apply the shift, as nowhere else: completion token ``r`` is predicted at position
        ``prompt length + r - 1``."""
        input_ids = np.zeros((len(tasks), max(task.input_tokens for task in tasks)), dtype=np.int64)
        attention_mask = np.zeros_like(input_ids)
        for row, task in enumerate(tasks):
            tokens = np.concatenate([task.prompt_ids, task.completion_ids])
            input_ids[row, : task.input_tokens] = tokens[:-1]
            attention_mask[row, : task.input_tokens] = 1
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


def candidates_of(tasks: Sequence[LocalTask], device: torch.device) -> Tensor | None:
    """Return [rows, widest], -1 where missing; None if the teacher chooses its top-k."""
    if tasks[0].candidate_ids is None:
        return None
    rows = [row for task in tasks for row in task.candidate_ids or ()]
    padded = np.full((len(rows), max(map(len, rows))), ABSENT_ID, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded).to(device)


def split_by_task(
    scores: LocalRowScores, hidden: Tensor | None, tasks: Sequence[LocalTask], options: ScoreOptions
) -> list[LocalScore]:
    """Split rows by task, cut to the task's width: results must not depend on the batch."""
    split: list[LocalScore] = []
    start = 0
    for task in tasks:
        rows = slice(start, start + len(task.completion_ids))
        topk = scores.part(rows, _width(options, task))
        # Copied: a slice would keep the batch in memory.
        split.append(LocalScore(topk, None if hidden is None else hidden[rows].clone()))
        start = rows.stop
    return split


def _width(options: ScoreOptions, task: LocalTask) -> int:
    rows = task.candidate_ids
    return options.top_k if rows is None else max(map(len, rows), default=0)


def empty_score(options: ScoreOptions, task: LocalTask) -> LocalScore:
    k = _width(options, task)
    empty = np.zeros(0, dtype=np.float32)
    topk = TopKLogprobs(
        ids=np.zeros((0, k), dtype=np.int32),
        logprobs=np.zeros((0, k), dtype=np.float32),
        token_logprobs=empty,
        tail_logprobs=empty,
    )
    return LocalScore(topk, torch.zeros((0, 0)) if options.hidden else None)
