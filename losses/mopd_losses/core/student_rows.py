"""``StudentLogprobs``: the student's next-token log-probabilities, computed where they are needed.

A loss never sees a matrix of logits. It asks for the log-probability of this id at that slot; who
answers may hold all logits under autograd (``DenseRows``) or one block of them with gradients made
by hand (``blockwise_head``). So every loss is written once and costs what it reads.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

_RANKED_ROWS = 64  # rows that are copied at once to be ranked


@runtime_checkable
class StudentLogprobs(Protocol):
    """Slot ``s`` is the distribution that predicts completion token ``s``."""

    @property
    def slots(self) -> int:
        """Completion tokens."""
        ...

    @property
    def width(self) -> int:
        """Rows of the student's head, padding included; padding has probability zero."""
        ...

    @property
    def device(self) -> torch.device:
        """Where answers stand."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """float32, or float64 for gradient checks."""
        ...

    def logprobs(
        self, slots: Int64[Tensor, "n"], ids: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n"]:
        """``ln p(id | slot)`` for each pair, in nats; differentiable.

        Args:
            slots: int64 [n].
            ids: int64 [n].

        Returns:
            [n]; ``-inf`` for padding ids.
        """
        ...

    def whole_rows(
        self, slots: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n width"]:
        """``ln p(id | slot)`` of every id, in nats; differentiable, and as large as it looks.

        Args:
            slots: int64 [n].

        Returns:
            [n, width]; ``-inf`` for padding ids.
        """
        ...

    def zeros(self) -> Float[Tensor, "slots"]:
        """[slots] zeros that hang in the graph: what a loss returns where it compared nothing."""
        ...

    def most_likely_ids(
        self, slots: Int64[Tensor, "n"], allowed: Bool[Tensor, "width"], count: int
    ) -> Int64[Tensor, "n most"]:
        """The most likely ids of each slot among the allowed ones, most likely first.

        A choice, without a gradient; ``logprobs`` of what was chosen has one.

        Args:
            slots: int64 [n].
            allowed: bool [width].

        Returns:
            int64 [n, at most count]; -1 where fewer ids have any probability.
        """
        ...


class DenseRows:
    """Rows of a full matrix of logits, under autograd.

    Args:
        logits: [slots, width]; half precision is raised to float32 before any exp or log.
        real_ids: bool [width], False for rows of the head that belong to no token.
    """

    def __init__(
        self, logits: Float[Tensor, "slots width"], real_ids: Bool[Tensor, "width"]
    ) -> None:
        self._graph = logits
        rows = logits if logits.dtype == torch.float64 else logits.float()
        rows = rows.masked_fill(~real_ids, -torch.inf)
        # From the row's peak: normalisers are then small, and a tail of 1e-5 survives float32.
        self._logits = rows - rows.detach().amax(dim=1, keepdim=True)
        self._log_normalisers: dict[float, Tensor] = {}

    @property
    def slots(self) -> int:
        """See ``StudentLogprobs``."""
        return self._logits.shape[0]

    @property
    def width(self) -> int:
        """See ``StudentLogprobs``."""
        return self._logits.shape[1]

    @property
    def device(self) -> torch.device:
        """See ``StudentLogprobs``."""
        return self._logits.device

    @property
    def dtype(self) -> torch.dtype:
        """See ``StudentLogprobs``."""
        return self._logits.dtype

    def logprobs(
        self, slots: Int64[Tensor, "n"], ids: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n"]:
        """See ``StudentLogprobs``."""
        return self._logits[slots, ids] / temperature - self._normalisers(temperature)[slots]

    def whole_rows(
        self, slots: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n width"]:
        """See ``StudentLogprobs``."""
        return self._logits[slots] / temperature - self._normalisers(temperature)[slots, None]

    def zeros(self) -> Float[Tensor, "slots"]:
        """See ``StudentLogprobs``."""
        # The sum of nothing: zero even where logits are not finite.
        return self._graph[:, :0].sum(dim=1).to(self.dtype)

    def most_likely_ids(
        self, slots: Int64[Tensor, "n"], allowed: Bool[Tensor, "width"], count: int
    ) -> Int64[Tensor, "n most"]:
        """See ``StudentLogprobs``."""
        return most_likely_ids(self._logits, slots, allowed, count)

    def _normalisers(self, temperature: float) -> Float[Tensor, "slots"]:
        if temperature not in self._log_normalisers:
            self._log_normalisers[temperature] = (self._logits / temperature).logsumexp(dim=1)
        return self._log_normalisers[temperature]


def most_likely_ids(
    logits: Float[Tensor, "slots width"],
    slots: Int64[Tensor, "n"],
    allowed: Bool[Tensor, "width"],
    count: int,
) -> Int64[Tensor, "n most"]:
    """``StudentLogprobs.most_likely_ids`` of [slots, width] logits; copies a few rows at a time."""
    chosen: list[Tensor] = []
    for part in slots.split(_RANKED_ROWS):
        rows = logits.detach()[part].masked_fill_(~allowed, -torch.inf)
        values, ids = rows.topk(min(count, logits.shape[1]), dim=1)
        chosen.append(ids.masked_fill_(torch.isneginf(values), -1))
    return torch.cat(chosen)
