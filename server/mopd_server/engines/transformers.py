"""``TransformersEngine``: scores with a Hugging Face causal language model, on any torch device.

The model's decoder runs over whole sequences, its head only over the rows that predict completion
tokens, a few hundred rows at a time: the logits of a long batch never stand in memory at once.
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

from mopd_protocol.errors import ConfigError
from mopd_protocol.runtime.model_revision import name_of, revision_of
from mopd_protocol.runtime.npu import import_backend
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs
from mopd_server.engines.base import EngineDead, EngineDescription, ScoringTask, no_rows
from mopd_server.engines.distributions import (
    RowScores,
    join_rows,
    keep_candidates,
    keep_top,
    normalize,
)
from mopd_server.engines.length_buckets import length_buckets
from mopd_server.settings import DtypeName, TeacherSettings

logger = logging.getLogger(__name__)

#: Rows that go through the head at once: 256 rows of 150 000 float32 logits are 150 MB.
ROWS_PER_CHUNK = 256


def load_transformers_engine(settings: TeacherSettings, table: TokenTable) -> "TransformersEngine":
    """The engine for a model folder or hub id.

    Raises:
        ConfigError: when the model cannot be loaded, or does not fit the tokenizer or settings.
    """
    device = _device(settings.device)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            settings.model,
            revision=settings.revision,
            dtype=_dtype(settings.dtype, device),
            trust_remote_code=settings.trust_remote_code,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"cannot load model {settings.model!r}: {_first_line(error)}; "
            "expected a folder or hub id of a causal language model"
        ) from error
    torch.nn.Module.to(model, device)  # a model's own ``to`` is annotated as a decorator
    model.eval()
    return TransformersEngine(
        model,
        table,
        name=name_of(settings.model),
        revision=revision_of(settings.model, model.config, asked=settings.revision),
        max_model_len=_max_model_len(model, settings.max_model_len),
        max_batch_tokens=settings.max_batch_tokens,
    )


class TransformersEngine:
    """An ``Engine`` around a loaded model.

    Raises:
        DataError: when the head is narrower than the tokenizer (``real_ids``).
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
        self._padding = (~real).to(model.device)
        self._description = EngineDescription(
            engine="transformers",
            # torch decides how sums are rounded, so it is part of what decides the scores.
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
        """Who this engine is."""
        return self._description

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        """See ``Engine.score``."""
        try:
            return self._score_batch(batch, top_k, temperature)
        except RuntimeError as error:  # torch's own errors are among them
            if not _answers(self._model.device):
                raise EngineDead(
                    f"device {str(self._model.device)!r} fails every call since "
                    f"{type(error).__name__}: {_first_line(error)}"
                ) from error
            raise

    def _score_batch(
        self, batch: Sequence[ScoringTask], top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        scores: list[TopKLogprobs] = [no_rows(0 if task.candidate_ids else top_k) for task in batch]
        for with_candidates in (False, True):
            positions = [
                position
                for position, task in enumerate(batch)
                if len(task.completion_ids) and (task.candidate_ids is not None) == with_candidates
            ]
            lengths = [_input_length(batch[position]) for position in positions]
            for bucket in length_buckets(lengths, self._max_batch_tokens):
                chosen = [positions[member] for member in bucket]
                tasks = [batch[position] for position in chosen]
                for position, score in zip(
                    chosen, self._score_bucket(tasks, top_k, temperature), strict=True
                ):
                    scores[position] = score
        return scores

    @torch.inference_mode()
    def _score_bucket(
        self, tasks: Sequence[ScoringTask], top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        """Tasks of similar length, each with completion tokens; all with candidates or none."""
        device = self._model.device
        tokens = torch.from_numpy(np.concatenate([task.completion_ids for task in tasks]))
        tokens = tokens.long().to(device)
        candidates = _candidate_rows(tasks)
        candidates = None if candidates is None else candidates.to(device)
        rows = self._logits(_padded_inputs(tasks, device))
        parts: list[RowScores] = []
        for start in range(0, len(tokens), ROWS_PER_CHUNK):
            chunk = slice(start, start + ROWS_PER_CHUNK)
            logprobs = normalize(rows(chunk), self._padding, temperature)
            if candidates is None:
                parts.append(keep_top(logprobs, tokens[chunk], top_k))
            else:
                parts.append(keep_candidates(logprobs, tokens[chunk], candidates[chunk]))
        return _split(join_rows(parts), tasks, top_k)


@dataclass(frozen=True, eq=False)
class _Inputs:
    """Sequences padded on the right, and which positions predict completion tokens."""

    input_ids: Tensor  # [sequences, longest]
    attention_mask: Tensor  # [sequences, longest]
    row_sequences: Tensor  # [rows], the sequence of each row
    row_positions: Tensor  # [rows], its position there


#: Logits of a slice of the rows of some inputs.
_Rows = Callable[[slice], Tensor]


def _input_length(task: ScoringTask) -> int:
    """Tokens that the model reads: the last completion token is predicted, never read."""
    return task.tokens - 1


def _padded_inputs(tasks: Sequence[ScoringTask], device: torch.device) -> _Inputs:
    """The one place where the shift is applied: completion token ``r`` is predicted at position
    ``prompt length + r - 1``, by the token before it."""
    longest = max(_input_length(task) for task in tasks)
    input_ids = np.zeros((len(tasks), longest), dtype=np.int64)  # id 0 pads; the mask hides it
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
    """[rows, widest] candidate ids of all tasks, -1 where a row has fewer; None without any."""
    rows = [row for task in tasks for row in task.candidate_ids or ()]
    if not rows:
        return None
    padded = np.full((len(rows), max(map(len, rows))), ABSENT_ID, dtype=np.int64)
    for position, row in enumerate(rows):
        padded[position, : len(row)] = row
    return torch.from_numpy(padded)


def _split(joined: TopKLogprobs, tasks: Sequence[ScoringTask], top_k: int) -> list[TopKLogprobs]:
    """Each task's rows, as wide as the task asked: its company must not show in its answer."""
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
    """One short forward pass, watched: what the head was given, made, and what came out."""

    head_input: Tensor | None
    head_output: Tensor | None
    decoder_output: Tensor | None
    logits: Tensor


@torch.inference_mode()
def _probe(model: PreTrainedModel, table: TokenTable) -> _Probe:
    generator = np.random.default_rng(0)
    embeddings = cast(torch.nn.Embedding, model.get_input_embeddings())
    # A tokenizer of another model may have ids that this one cannot read; the head's width tells.
    readable = np.flatnonzero(table.present[: embeddings.weight.shape[0]])
    input_ids = generator.choice(readable, size=(1, 8))
    input_ids = torch.from_numpy(input_ids).to(model.device)
    head = model.get_output_embeddings()
    seen: list[tuple[Tensor, Tensor]] = []
    if head is None:
        return _Probe(None, None, None, model(input_ids).logits)

    def watch(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((inputs[0], output))

    hook = head.register_forward_hook(watch)
    logits = model(input_ids, use_cache=False).logits
    hook.remove()
    if len(seen) != 1 or model.base_model is model:
        return _Probe(None, None, None, logits)
    hidden = model.base_model(input_ids, use_cache=False).last_hidden_state
    return _Probe(*seen[0], hidden, logits)


def _row_logits(model: PreTrainedModel, probe: _Probe) -> Callable[[_Inputs], _Rows]:
    """How this model's logits are computed: by its head on chosen rows, or all of them at once.

    Some families do more than apply the head (soft-cap or scale logits, scale hidden states).
    There, logits are taken from the whole model, one sequence at a time.
    """
    if _is_decoder_then_head(probe):
        return lambda inputs: _rows_by_head(model, inputs)
    logger.info(
        "%s changes hidden states or logits around its head: full logits are computed for one "
        "sequence at a time, which takes more memory",
        type(model).__name__,
    )
    return lambda inputs: _rows_by_whole_model(model, inputs)


def _is_decoder_then_head(probe: _Probe) -> bool:
    if probe.head_input is None or probe.head_output is None or probe.decoder_output is None:
        return False
    # Logits are compared bit for bit: a soft-cap moves the small logits of a probe very little,
    # and large ones a lot. Hidden states come from a second pass, so kernels may round otherwise.
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


def _rows_by_whole_model(model: PreTrainedModel, inputs: _Inputs) -> _Rows:
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
    import_backend(name, asked_by=f"device {name!r}")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {name!r} cannot be used: {_first_line(error)}; expected one such as cpu, "
            "cuda, cuda:1 or npu"
        ) from error
    return device


def _answers(device: torch.device) -> bool:
    """Whether a device still computes: after some errors it fails every call of this process."""
    try:
        return torch.ones(1, device=device).add_(1).item() == 2.0
    except RuntimeError:
        return False


def _dtype(name: DtypeName, device: torch.device) -> torch.dtype | str:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _max_model_len(model: PreTrainedModel, asked: int | None) -> int:
    own: int | None = model.config.get_text_config().to_dict().get("max_position_embeddings")
    if asked is None and own is None:
        raise ConfigError(
            f"{type(model).__name__} does not say how long its sequences may be; "
            "say it with --max-model-len"
        )
    if asked is not None and own is not None and asked > own:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {own} positions of this model; "
            f"expected at most {own}"
        )
    longest = asked or own
    assert longest is not None
    return longest


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
