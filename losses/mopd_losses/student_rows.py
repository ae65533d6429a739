"""``StudentRows``: the student's next-token log-probabilities, read only where a loss needs them.

A loss never sees a matrix of logits. It asks for the log-probability of this id at that slot; who
answers may hold all logits under autograd (``DenseRows``) or one block of them with gradients made
by hand (``blockwise_head``). So every loss is written once and costs what it reads.
"""

from typing import Protocol

import torch
from torch import Tensor


class StudentRows(Protocol):
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

    def logprobs(self, slots: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
        """``ln p(id | slot)`` for each pair, in nats; differentiable.

        Args:
            slots: int64 [n].
            ids: int64 [n].

        Returns:
            [n]; ``-inf`` for padding ids.
        """
        ...

    def zeros(self) -> Tensor:
        """[slots] zeros that hang in the graph: what a loss returns where it compared nothing."""
        ...


class DenseRows:
    """Rows of a full matrix of logits, under autograd.

    Args:
        logits: [slots, width]; half precision is raised to float32 before any exp or log.
        real_ids: bool [width], False for rows of the head that belong to no token.
    """

    def __init__(self, logits: Tensor, real_ids: Tensor) -> None:
        self._graph = logits
        rows = logits if logits.dtype == torch.float64 else logits.float()
        rows = rows.masked_fill(~real_ids, -torch.inf)
        # From the row's peak: normalisers are then small, and a tail of 1e-5 survives float32.
        self._logits = rows - rows.detach().amax(dim=1, keepdim=True)
        self._log_normalisers: dict[float, Tensor] = {}

    @property
    def slots(self) -> int:
        """See ``StudentRows``."""
        return self._logits.shape[0]

    @property
    def width(self) -> int:
        """See ``StudentRows``."""
        return self._logits.shape[1]

    @property
    def device(self) -> torch.device:
        """See ``StudentRows``."""
        return self._logits.device

    @property
    def dtype(self) -> torch.dtype:
        """See ``StudentRows``."""
        return self._logits.dtype

    def logprobs(self, slots: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
        """See ``StudentRows``."""
        if temperature not in self._log_normalisers:
            self._log_normalisers[temperature] = (self._logits / temperature).logsumexp(dim=1)
        return self._logits[slots, ids] / temperature - self._log_normalisers[temperature][slots]

    def zeros(self) -> Tensor:
        """See ``StudentRows``."""
        # The sum of nothing: zero even where logits are not finite.
        return self._graph[:, :0].sum(dim=1).to(self.dtype)
