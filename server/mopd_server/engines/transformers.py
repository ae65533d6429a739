"""``TransformersEngine``: scores with a Hugging Face causal language model, on any torch device.

The decoder runs over full sequences; the head only over the rows that predict completion tokens,
a few hundred rows per chunk, so that the logits of a long batch are never in memory at once.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from mopd_protocol.errors import ConfigError, first_line
from mopd_protocol.runtime.model_config import explaining_config, max_positions
from mopd_protocol.runtime.model_revision import name_of, revision_of
from mopd_protocol.runtime.model_weights import load_complete
from mopd_protocol.runtime.npu import import_backend
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs
from mopd_server.engines.adapters import Adapter, load_adapters
from mopd_server.engines.base import (
    EngineCrashError,
    EngineDescription,
    ScoringTask,
    empty_scores,
)
from mopd_server.engines.distributions import (
    concatenate,
    truncated_rows,
)
from mopd_server.engines.length_buckets import length_buckets
from mopd_server.engines.model_adapters import ModelAdapters
from mopd_server.engines.row_logits import (
    Inputs,
    head_rows,
    is_decoder_then_head,
    row_logits,
    run_probe,
)
from mopd_server.engines.shared_prompts import (
    groups_of_prompts,
    hidden_rows,
    supports_shared_prompts,
)
from mopd_server.settings import DtypeName, TeacherSettings

logger = logging.getLogger(__name__)


def is_available(settings: TeacherSettings) -> bool:
    """Return True: this engine runs on every device."""
    return True


def load_engine(settings: TeacherSettings, table: TokenTable) -> "TransformersEngine":
    """Load the engine for a model folder or hub id.

    Raises:
        ConfigError: if the model cannot be loaded or does not fit the settings.
        WeightsError: if the weights are incomplete, or not those of a causal language model.
        DataError: if the head is narrower than the tokenizer.
    """
    device = _device(settings.device)
    adapters = load_adapters(settings.adapter)
    with explaining_config(f"model {settings.model!r}: loading failed", "model"):
        model: PreTrainedModel = load_complete(
            f"model {settings.model!r}",
            AutoModelForCausalLM.from_pretrained,
            settings.model,
            revision=settings.revision,
            dtype=_dtype(settings.dtype, device),
            trust_remote_code=settings.trust_remote_code,
        )
    torch.nn.Module.to(model, device)  # a model's own ``to`` is annotated as a decorator
    model.eval()
    return TransformersEngine(
        model,
        table,
        name=name_of(settings.model),
        revision=revision_of(settings.model, model.config, requested=settings.revision),
        max_model_len=_max_model_len(model, settings.max_model_len),
        max_batch_tokens=settings.max_batch_tokens,
        adapters=adapters,
    )


class TransformersEngine:
    """An ``Engine`` around a loaded model.

    Raises:
        DataError: if the head is narrower than the tokenizer (``real_ids``).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        table: TokenTable,
        *,
        name: str,
        revision: str,
        max_model_len: int,
        max_batch_tokens: int,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self._model = model
        self._adapters = ModelAdapters(model, adapters)
        self._max_batch_tokens = max_batch_tokens
        probe = run_probe(model, table)
        self._logits = row_logits(model, probe)
        self._shares_prompts = is_decoder_then_head(probe) and supports_shared_prompts(
            model, probe.input_ids
        )
        real = torch.from_numpy(table.real_ids(probe.logits.shape[-1]))
        self._padding = None if real.all() else (~real).to(model.device)
        self._description = EngineDescription(
            engine="transformers",
            # torch decides how sums are rounded, and so affects the scores.
            engine_version=f"{transformers.__version__} (torch {torch.__version__})",
            model=name,
            revision=revision,
            dtype=str(model.dtype).removeprefix("torch."),
            logit_width=probe.logits.shape[-1],
            max_model_len=max_model_len,
            candidate_ids=True,
            temperature=True,
            adapters=tuple(adapters),
        )

    @property
    def description(self) -> EngineDescription:
        """Facts for the manifest."""
        return self._description

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        """See ``Engine.score``."""
        try:
            return self._score_batch(batch, top_k, temperature)
        except RuntimeError as error:  # includes torch's own errors
            if not _is_working(self._model.device):
                raise EngineCrashError(
                    f"device {str(self._model.device)!r} fails every call since "
                    f"{type(error).__name__}: {first_line(error)}"
                ) from error
            raise

    def release(self) -> None:
        """Free the memory of the weights; the engine cannot score any more.

        The model itself is freed by the garbage collector: it may be part of a cycle.
        """
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            tensor.data = tensor.data.new_empty(0)
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def _score_batch(
        self, batch: Sequence[ScoringTask], top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        scores = [empty_scores(0 if task.candidate_ids else top_k) for task in batch]
        kinds: dict[tuple[str | None, bool], list[int]] = defaultdict(list)
        for index, task in enumerate(batch):
            if len(task.completion_ids):
                kinds[task.adapter, task.candidate_ids is not None].append(index)
        for (adapter, _), indices in kinds.items():
            self._adapters.activate(adapter)
            for members, shared in self._buckets(batch, indices):
                tasks = [batch[index] for index in members]
                results = self._score_bucket(tasks, top_k, temperature, shared=shared)
                for index, score in zip(members, results, strict=True):
                    scores[index] = score
        return scores

    def _buckets(
        self, batch: Sequence[ScoringTask], indices: Sequence[int]
    ) -> Iterator[tuple[list[int], bool]]:
        """Yield indices of tasks with one prompt (True), and of others of similar length."""
        rest = [*indices]
        if self._shares_prompts:
            tasks = [batch[index] for index in indices]
            for group in groups_of_prompts(tasks, self._max_batch_tokens):
                members = [indices[position] for position in group]
                rest = [index for index in rest if index not in members]
                yield members, True
        lengths = [_input_length(batch[index]) for index in rest]
        for bucket in length_buckets(lengths, self._max_batch_tokens):
            yield [rest[position] for position in bucket], False

    @torch.inference_mode()
    def _score_bucket(
        self, tasks: Sequence[ScoringTask], top_k: int, temperature: float, *, shared: bool
    ) -> list[TopKLogprobs]:
        """Score non-empty completions, all or none with candidates; ``shared``: of one prompt."""
        device = self._model.device
        tokens = torch.from_numpy(np.concatenate([task.completion_ids for task in tasks]))
        tokens = tokens.long().to(device)
        candidates = _candidate_rows(tasks)
        candidates = None if candidates is None else candidates.to(device)
        chunks = truncated_rows(
            head_rows(self._model, hidden_rows(self._model, tasks))
            if shared
            else self._logits(_padded_inputs(tasks, device)),
            tokens,
            self._description.logit_width,
            top_k=top_k,
            candidates=candidates,
            padding=self._padding,
            temperature=temperature,
        )
        return _split(concatenate(chunks), tasks, top_k)


def _input_length(task: ScoringTask) -> int:
    """Return the number of input tokens: the last completion token is predicted only."""
    return task.tokens - 1


def _padded_inputs(tasks: Sequence[ScoringTask], device: torch.device) -> Inputs:
    """Pad the sequences and apply the shift, which happens nowhere else.

    Completion token ``r`` is predicted at position ``prompt length + r - 1``.
    """
    longest = max(_input_length(task) for task in tasks)
    input_ids = np.zeros((len(tasks), longest), dtype=np.int64)  # padded with id 0, masked
    attention_mask = np.zeros_like(input_ids)
    for row, task in enumerate(tasks):
        length = _input_length(task)
        input_ids[row, :length] = np.concatenate([task.prompt_ids, task.completion_ids])[:-1]
        attention_mask[row, :length] = 1
    row_counts = [len(task.completion_ids) for task in tasks]
    positions = [
        len(task.prompt_ids) - 1 + np.arange(rows)
        for task, rows in zip(tasks, row_counts, strict=True)
    ]
    return Inputs(
        torch.from_numpy(input_ids).to(device),
        torch.from_numpy(attention_mask).to(device),
        torch.from_numpy(np.repeat(np.arange(len(tasks)), row_counts)).to(device),
        torch.from_numpy(np.concatenate(positions)).to(device),
    )


def _candidate_rows(tasks: Sequence[ScoringTask]) -> Tensor | None:
    """Return the candidate ids of all tasks, [rows, widest], padded with -1; None without any."""
    rows = [row for task in tasks for row in task.candidate_ids or ()]
    if not rows:
        return None
    padded = np.full((len(rows), max(map(len, rows))), ABSENT_ID, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded)


def _split(joined: TopKLogprobs, tasks: Sequence[ScoringTask], top_k: int) -> list[TopKLogprobs]:
    """Split rows by task, in the task's own width: the rest of the batch must not affect a
    result."""
    scores: list[TopKLogprobs] = []
    start = 0
    for task in tasks:
        rows = slice(start, start + len(task.completion_ids))
        candidates = task.candidate_ids
        width = top_k if candidates is None else max(map(len, candidates))
        scores.append(
            TopKLogprobs(
                ids=joined.ids[rows, :width],
                logprobs=joined.logprobs[rows, :width],
                token_logprobs=joined.token_logprobs[rows],
                tail_logprobs=joined.tail_logprobs[rows],
                token_ranks=None if joined.token_ranks is None else joined.token_ranks[rows],
            )
        )
        start = rows.stop
    return scores


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    import_backend(name, subject=f"device {name!r}")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {name!r}: not available: {first_line(error)} (expected a torch device such as "
            "cpu, cuda, cuda:1 or npu)",
            key="device",
        ) from error
    return device


def _is_working(device: torch.device) -> bool:
    """Return False if the device fails all calls of this process, as it does after some errors."""
    try:
        return torch.ones(1, device=device).add_(1).item() == 2.0
    except RuntimeError:
        return False


def _dtype(name: DtypeName, device: torch.device) -> torch.dtype | str:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _max_model_len(model: PreTrainedModel, requested: int | None) -> int:
    positions = max_positions(model.config)
    if requested is not None and positions is not None and requested > positions:
        raise ConfigError(
            f"--max-model-len: above the limit of the model (found {requested}, expected at most "
            f"{positions} positions)",
            key="max_model_len",
        )
    longest = requested or positions
    if longest is None:
        raise ConfigError(
            f"{type(model).__name__}: max_position_embeddings not found in its config. "
            "Set --max-model-len.",
            key="max_model_len",
        )
    return longest
