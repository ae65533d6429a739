"""Logits of the rows that predict completion tokens, by the head or by the full model."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mopd_protocol.runtime.model_config import explaining_config
from mopd_protocol.tokenizers.token_table import TokenTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Right-padded sequences, and the positions that predict completion tokens."""

    input_ids: Tensor  # [sequences, longest]
    attention_mask: Tensor  # [sequences, longest]
    row_sequences: Tensor  # [rows], sequence of each row
    row_positions: Tensor  # [rows], position in that sequence


#: Logits of a slice of the rows of some inputs.
Rows = Callable[[slice], Tensor]


@dataclass(frozen=True, eq=False)
class Probe:
    """Tensors of one short forward pass; None where the model has no separate head."""

    input_ids: Tensor
    logits: Tensor
    head_input: Tensor | None = None
    head_output: Tensor | None = None
    decoder_output: Tensor | None = None


@torch.inference_mode()
def run_probe(model: PreTrainedModel, table: TokenTable) -> Probe:
    """Run the model on 8 tokens, and record its head.

    Raises:
        ConfigError: if the model cannot be run, because values of its configuration are null.
    """
    generator = np.random.default_rng(0)
    embeddings = cast(torch.nn.Embedding, model.get_input_embeddings())
    # The tokenizer of another model may have ids beyond the embeddings; the width of the head
    # reveals that later.
    valid_ids = np.flatnonzero(table.present[: embeddings.weight.shape[0]])
    input_ids = torch.from_numpy(generator.choice(valid_ids, size=(1, 8))).to(model.device)
    head = model.get_output_embeddings()
    calls: list[tuple[Tensor, Tensor]] = []
    running = explaining_config(f"{type(model).__name__} cannot be run", "model", model.config)
    if head is None:
        with running:
            return Probe(input_ids, model(input_ids).logits)

    def record(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((inputs[0], output))

    hook = head.register_forward_hook(record)
    with running:
        logits = model(input_ids, use_cache=False).logits
    hook.remove()
    if len(calls) != 1 or model.base_model is model:
        return Probe(input_ids, logits)
    hidden = model.base_model(input_ids, use_cache=False).last_hidden_state
    return Probe(input_ids, logits, *calls[0], hidden)


def row_logits(model: PreTrainedModel, probe: Probe) -> Callable[[Inputs], Rows]:
    """Return how to compute logits: by the head on selected rows, or by the full model.

    Some families do more than apply the head (soft-cap or scale logits, scale hidden states).
    Their logits come from the full model, one sequence at a time.
    """
    if is_decoder_then_head(probe):
        return lambda inputs: _rows_by_head(model, inputs)
    logger.info(
        "%s changes hidden states or logits around its head: computing full logits, one sequence "
        "at a time, which needs more memory",
        type(model).__name__,
    )
    return lambda inputs: _rows_by_full_model(model, inputs)


def is_decoder_then_head(probe: Probe) -> bool:
    """Return whether the logits are those of the head on the decoder's last hidden states."""
    if probe.head_input is None or probe.head_output is None or probe.decoder_output is None:
        return False
    # Logits are compared bit for bit: a soft-cap changes the small logits of a probe very little,
    # and large ones a lot. Hidden states come from a second pass, whose kernels may round
    # differently.
    return torch.equal(probe.head_output.float(), probe.logits.float()) and torch.allclose(
        probe.head_input.float(), probe.decoder_output.float(), rtol=1e-2, atol=1e-3
    )


def _rows_by_head(model: PreTrainedModel, inputs: Inputs) -> Rows:
    hidden = model.base_model(
        input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, use_cache=False
    ).last_hidden_state[inputs.row_sequences, inputs.row_positions]
    return head_rows(model, hidden)


def head_rows(model: PreTrainedModel, hidden: Tensor) -> Rows:
    """Return the logits of the head for hidden states ``[rows, hidden]``."""
    head = model.get_output_embeddings()
    assert head is not None

    def rows(chunk: slice) -> Tensor:
        return head(hidden[chunk])

    return rows


def _rows_by_full_model(model: PreTrainedModel, inputs: Inputs) -> Rows:
    rows: list[Tensor] = []
    for sequence, mask in enumerate(inputs.attention_mask):
        input_ids = inputs.input_ids[sequence : sequence + 1, : int(mask.sum())]
        logits = model(input_ids, use_cache=False).logits[0]
        rows.append(logits[inputs.row_positions[inputs.row_sequences == sequence]])
    logits = torch.cat(rows)
    return lambda chunk: logits[chunk]
