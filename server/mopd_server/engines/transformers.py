"""``TransformersEngine``: scores with a Hugging Face causal language model, on any torch device.

The decoder runs over full sequences; the head only over the rows that predict completion tokens,
a few hundred rows per chunk, so that the logits of a long batch are never in memory at once.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from mopd_protocol.errors import ConfigError, WeightsError
from mopd_protocol.runtime.model_revision import name_of, revision_of
from mopd_protocol.runtime.model_weights import load_complete
from mopd_protocol.runtime.npu import import_backend
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs
from mopd_server.engines.base import (
    EngineCrashError,
    EngineDescription,
    ScoringTask,
    empty_scores,
    first_line,
)
from mopd_server.engines.distributions import (
    concatenate,
    truncated_rows,
)
from mopd_server.engines.length_buckets import length_buckets
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
    try:
        model: PreTrainedModel = load_complete(
            f"model {settings.model!r}",
            AutoModelForCausalLM.from_pretrained,
            settings.model,
            revision=settings.revision,
            dtype=_dtype(settings.dtype, device),
            trust_remote_code=settings.trust_remote_code,
        )
    except WeightsError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"model {settings.model!r}: loading failed: {first_line(error)} (expected a folder or "
            "hub id of a causal language model)",
            key="model",
        ) from error
    torch.nn.Module.to(model, device)  # a model's own ``to`` is annotated as a decorator
    model.eval()
    return TransformersEngine(
        model,
        table,
        name=name_of(settings.model),
        revision=revision_of(settings.model, model.config, requested=settings.revision),
        max_model_len=_max_model_len(model, settings.max_model_len),
        max_batch_tokens=settings.max_batch_tokens,
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
    ) -> None:
        self._model = model
        self._max_batch_tokens = max_batch_tokens
        probe = _probe(model, table)
        self._logits = _row_logits(model, probe)
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

    def _score_batch(
        self, batch: Sequence[ScoringTask], top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        scores = [empty_scores(0 if task.candidate_ids else top_k) for task in batch]
        for with_candidates in (False, True):
            indices = [
                index
                for index, task in enumerate(batch)
                if len(task.completion_ids) and (task.candidate_ids is not None) == with_candidates
            ]
            lengths = [_input_length(batch[index]) for index in indices]
            for bucket in length_buckets(lengths, self._max_batch_tokens):
                members = [indices[position] for position in bucket]
                tasks = [batch[index] for index in members]
                for index, score in zip(
                    members, self._score_bucket(tasks, top_k, temperature), strict=True
                ):
                    scores[index] = score
        return scores

    @torch.inference_mode()
    def _score_bucket(
        self, tasks: Sequence[ScoringTask], top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        """Score tasks of similar length with non-empty completions, all or none with candidates."""
        device = self._model.device
        tokens = torch.from_numpy(np.concatenate([task.completion_ids for task in tasks]))
        tokens = tokens.long().to(device)
        candidates = _candidate_rows(tasks)
        candidates = None if candidates is None else candidates.to(device)
        chunks = truncated_rows(
            self._logits(_padded_inputs(tasks, device)),
            tokens,
            self._description.logit_width,
            top_k=top_k,
            candidates=candidates,
            padding=self._padding,
            temperature=temperature,
        )
        return _split(concatenate(chunks), tasks, top_k)


@dataclass(frozen=True, eq=False)
class _Inputs:
    """Right-padded sequences, and the positions that predict completion tokens."""

    input_ids: Tensor  # [sequences, longest]
    attention_mask: Tensor  # [sequences, longest]
    row_sequences: Tensor  # [rows], sequence of each row
    row_positions: Tensor  # [rows], position in that sequence


#: Logits of a slice of the rows of some inputs.
_Rows = Callable[[slice], Tensor]


def _input_length(task: ScoringTask) -> int:
    """Return the number of input tokens: the last completion token is predicted only."""
    return task.tokens - 1


def _padded_inputs(tasks: Sequence[ScoringTask], device: torch.device) -> _Inputs:
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
    return _Inputs(
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
            )
        )
        start = rows.stop
    return scores


@dataclass(frozen=True, eq=False)
class _Probe:
    """Tensors of one short forward pass; None where the model has no separate head."""

    logits: Tensor
    head_input: Tensor | None = None
    head_output: Tensor | None = None
    decoder_output: Tensor | None = None


@torch.inference_mode()
def _probe(model: PreTrainedModel, table: TokenTable) -> _Probe:
    generator = np.random.default_rng(0)
    embeddings = cast(torch.nn.Embedding, model.get_input_embeddings())
    # The tokenizer of another model may have ids beyond the embeddings; the width of the head
    # reveals that later.
    valid_ids = np.flatnonzero(table.present[: embeddings.weight.shape[0]])
    input_ids = torch.from_numpy(generator.choice(valid_ids, size=(1, 8))).to(model.device)
    head = model.get_output_embeddings()
    calls: list[tuple[Tensor, Tensor]] = []
    if head is None:
        return _Probe(model(input_ids).logits)

    def record(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((inputs[0], output))

    hook = head.register_forward_hook(record)
    logits = model(input_ids, use_cache=False).logits
    hook.remove()
    if len(calls) != 1 or model.base_model is model:
        return _Probe(logits)
    hidden = model.base_model(input_ids, use_cache=False).last_hidden_state
    return _Probe(logits, *calls[0], hidden)


def _row_logits(model: PreTrainedModel, probe: _Probe) -> Callable[[_Inputs], _Rows]:
    """Return how to compute logits: by the head on selected rows, or by the full model.

    Some families do more than apply the head (soft-cap or scale logits, scale hidden states).
    Their logits come from the full model, one sequence at a time.
    """
    if _is_decoder_then_head(probe):
        return lambda inputs: _rows_by_head(model, inputs)
    logger.info(
        "%s changes hidden states or logits around its head: computing full logits, one sequence "
        "at a time, which needs more memory",
        type(model).__name__,
    )
    return lambda inputs: _rows_by_full_model(model, inputs)


def _is_decoder_then_head(probe: _Probe) -> bool:
    if probe.head_input is None or probe.head_output is None or probe.decoder_output is None:
        return False
    # Logits are compared bit for bit: a soft-cap changes the small logits of a probe very little,
    # and large ones a lot. Hidden states come from a second pass, whose kernels may round
    # differently.
    return torch.equal(probe.head_output.float(), probe.logits.float()) and torch.allclose(
        probe.head_input.float(), probe.decoder_output.float(), rtol=1e-2, atol=1e-3
    )


def _rows_by_head(model: PreTrainedModel, inputs: _Inputs) -> _Rows:
    hidden = model.base_model(
        input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, use_cache=False
    ).last_hidden_state[inputs.row_sequences, inputs.row_positions]
    head = model.get_output_embeddings()
    assert head is not None

    def rows(chunk: slice) -> Tensor:
        return head(hidden[chunk])

    return rows


def _rows_by_full_model(model: PreTrainedModel, inputs: _Inputs) -> _Rows:
    rows: list[Tensor] = []
    for sequence, mask in enumerate(inputs.attention_mask):
        input_ids = inputs.input_ids[sequence : sequence + 1, : int(mask.sum())]
        logits = model(input_ids, use_cache=False).logits[0]
        rows.append(logits[inputs.row_positions[inputs.row_sequences == sequence]])
    logits = torch.cat(rows)
    return lambda chunk: logits[chunk]


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
    positions: int | None = model.config.get_text_config().to_dict().get("max_position_embeddings")
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
