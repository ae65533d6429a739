"""Attention over rows of several examples, one product per example.

For such a row transformers builds a mask of [tokens, tokens], and sdpa computes all of it. Inside
``packed_rows`` its implementation ``sdpa`` passes the bounds of the examples in place of that mask,
and computes attention within each example: the work and memory of separate rows, without padding.
Anywhere else it is transformers' own.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_packed: ContextVar[bool] = ContextVar("packed_rows", default=False)


@dataclass(frozen=True, eq=False)
class ExampleMask:
    """The mask of a row of several examples, which attend only to themselves.

    In each: first position, position behind the last, and the mask, bool [length, length]; None for
    a causal one.
    """

    examples: tuple[tuple[int, int, Tensor | None], ...]


@contextmanager
def packed_rows() -> Generator[None]:
    """Use the masks of this module in forward passes of this thread."""
    token = _packed.set(True)
    try:
        yield
    finally:
        _packed.reset(token)


def example_mask(**arguments: Any) -> ExampleMask | Tensor | None:
    """Return the mask of a row of several examples, and for other batches that of sdpa.

    The bounds are read from transformers' mask function, so that they are the model's: an example
    begins where a token does not attend to the one before.
    """
    length: int = arguments.get("q_length", 0)
    one_row = arguments.get("batch_size") == 1 and length == arguments.get("kv_length")
    # transformers permits is_causal for a row of one example.
    if not (_packed.get() and one_row) or arguments.get("allow_is_causal_skip", True):
        return sdpa_mask(**arguments)
    attends: Callable[..., Tensor] = arguments["mask_function"]
    positions = torch.arange(length, device=arguments["device"])
    first_row = torch.zeros_like(positions[:1])
    continues = attends(first_row, first_row, positions[1:], positions[:-1])
    starts = [0, *((~continues).nonzero()[:, 0] + 1).tolist()]
    ends = [*starts[1:], len(positions)]
    last = positions[[end - 1 for end in ends]]
    causal = attends(first_row, first_row, last, positions[starts]).tolist()

    def window(start: int, end: int) -> Tensor:
        own = positions[start:end]
        return attends(first_row, first_row, own[:, None], own[None, :])

    return ExampleMask(
        tuple(
            (start, end, None if each else window(start, end))
            for start, end, each in zip(starts, ends, causal, strict=True)
        )
    )


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ExampleMask | Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Return attention [rows, tokens, heads, size] of [rows, heads, tokens, size]."""
    if not isinstance(attention_mask, ExampleMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    # The gradient of a slice has the length of the row, that of a split is one concatenation.
    lengths = [end - start for start, end, _ in attention_mask.examples]
    splits = [each.split(lengths, dim=2) for each in (query, key, value)]
    outputs = [
        sdpa_attention_forward(module, q, k, v, mask, **arguments)[0]
        for q, k, v, (_, _, mask) in zip(*splits, attention_mask.examples, strict=True)
    ]
    return torch.cat(outputs, dim=1), None


AttentionInterface.register("sdpa", packed_attention)
AttentionMaskInterface.register("sdpa", example_mask)
