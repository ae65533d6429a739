"""Attention of the student: its implementation, and whether a row may contain several examples."""

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mopd_protocol.errors import ConfigError
from mopd_trainer.student.packed_attention import packed_rows

logger = logging.getLogger(__name__)

Packing = Literal["auto", "packed", "padded"]

#: Lengths of the examples of the test row.
_LENGTHS = (5, 2, 9)
#: Largest relative difference between hidden states in one row and in separate ones.
_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Use an implementation of transformers; ``auto`` keeps the loaded one.

    Raises:
        ConfigError: when this model, device or installation does not support it.
    """
    if implementation == "auto":
        return
    reason = "the model does not select its attention by this setting"
    try:
        model.set_attn_implementation(implementation)
    except (ImportError, ValueError) as error:
        reason = str(error).splitlines()[0]
    if attention_of(model) != implementation:
        raise ConfigError(
            f"student.attn_implementation: {implementation!r} is not supported by "
            f"{type(model).__name__} here: {reason} (found {attention_of(model)!r}). Set it to "
            "'auto'.",
            key="student.attn_implementation",
        )


def attention_of(model: PreTrainedModel) -> str:
    """Return the implementation that a model uses."""
    config: Any = model.config
    return config._attn_implementation or "eager"


def packs(
    forward: Callable[..., Any], model: PreTrainedModel, ids: Tensor, packing: Packing
) -> bool:
    """Return True if micro-batches may have one row of several examples.

    Decided by a test, because state-space and linear-attention layers, absolute positions and
    special masks would silently mix examples; on several ranks all must call it.

    Args:
        forward: the decoder, as it is trained.
        ids: int64 [tokens] on the student's device, of the vocabulary.

    Raises:
        ConfigError: for ``packed`` if the model does not support it.
    """
    if packing == "padded":
        return False
    attention = attention_of(model)
    config: Any = model.config
    if attention == "eager" and packing == "auto":
        reason = "'eager' attention would compute a mask of all tokens of a row"
    elif getattr(config, "attention_chunk_size", None):
        reason = "attention in chunks counts the positions of the row"
    else:
        reason = _difference(forward, ids, flash=attention.startswith("flash"))
    if reason is None:
        return True
    if packing == "packed":
        raise ConfigError(
            f"student.packing: 'packed' is not supported by {type(model).__name__}: {reason}. Set "
            "it to 'auto'.",
            key="student.packing",
        )
    logger.info("student: micro-batches are padded, because %s", reason)
    return False


@torch.no_grad()
def _difference(forward: Callable[..., Any], ids: Tensor, *, flash: bool) -> str | None:
    """Return how the hidden states of a packed row differ; None if they do not."""
    examples = [ids[torch.arange(length) % len(ids)] for length in _LENGTHS]
    positions = torch.cat([*map(torch.arange, _LENGTHS)])[None].to(ids.device)
    # Flash attention exists in half precision only.
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=flash):
        separate = [forward(input_ids=each[None], use_cache=False) for each in examples]
        expected = torch.cat([each.last_hidden_state[0] for each in separate])
        try:
            with packed_rows():
                output = forward(
                    input_ids=torch.cat(examples)[None], position_ids=positions, use_cache=False
                )
        except Exception as error:  # anything that the code of a model may raise
            return f"its forward pass failed ({type(error).__name__}: {error})"
    actual: Tensor = output.last_hidden_state[0]
    gap = float((actual - expected).norm() / expected.norm())
    limit = _DIFFERENCE[torch.bfloat16 if flash else actual.dtype]
    if gap <= limit:
        return None
    return f"examples of one row affect each other (found {gap:.2g}, expected at most {limit:g})"
