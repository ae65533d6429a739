"""``StudentLogprobs``: the student's next-token log-probabilities, computed on demand.

A loss reads no matrix of logits but the log-probabilities of pairs of position and id, from all
logits under autograd (``DenseRows``) or from one block of logits with analytical gradients
(``blockwise_head``). So every loss is implemented once, and its
cost depends only on the entries it reads.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mopd_losses.core.segments import expand_ranges, segment_logsumexp

_RANKED_ROWS = 64  # rows that are copied at once to be ranked


@runtime_checkable
class StudentLogprobs(Protocol):
    """Distributions by position; position ``s`` predicts completion token ``s``."""

    @property
    def positions(self) -> int:
        """Number of completion tokens."""
        ...

    @property
    def width(self) -> int:
        """Rows of the student's head, padding included; padding has probability zero."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of all returned tensors."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """float32, or float64 for gradient checks."""
        ...

    def logprobs(
        self, positions: Int64[Tensor, "n"], ids: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n"]:
        """Return ``ln p(id | position)`` for each pair, in nats; differentiable.

        Args:
            positions: int64 [n].
            ids: int64 [n].

        Returns:
            [n]; ``-inf`` for padding ids.
        """
        ...

    def range_logmasses(
        self,
        positions: Int64[Tensor, "n"],
        starts: Int64[Tensor, "n"],
        stops: Int64[Tensor, "n"],
        ids: Int64[Tensor, "m"],
        *,
        temperature: float = 1.0,
    ) -> Float[Tensor, "n"]:
        """Return the log of the mass of ``ids[start:stop]`` at each position, in nats;
        differentiable.

        Args:
            positions: int64 [n].
            starts: int64 [n], ranges in ``ids``.
            stops: int64 [n], exclusive.
            ids: int64 [m].

        Returns:
            [n]; ``-inf`` for an empty range.
        """
        ...

    def whole_rows(
        self, positions: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n width"]:
        """Return ``ln p(id | position)`` of every id, in nats; differentiable and large.

        Args:
            positions: int64 [n].

        Returns:
            [n, width]; ``-inf`` for padding ids.
        """
        ...

    def zeros(self) -> Float[Tensor, "positions"]:
        """Return [positions] zeros with a graph: the loss where nothing is compared."""
        ...

    def most_likely_ids(
        self, positions: Int64[Tensor, "n"], allowed: Bool[Tensor, "width"], count: int
    ) -> Int64[Tensor, "n most"]:
        """Return the most likely allowed ids of each position, most likely first; no gradient.

        Args:
            positions: int64 [n].
            allowed: bool [width].

        Returns:
            int64 [n, at most count]; -1 where fewer ids have any probability.
        """
        ...


class DenseRows:
    """``StudentLogprobs`` of a full matrix of logits, under autograd.

    Args:
        logits: [positions, width]; half precision is converted to float32 before any exp or log.
        real_ids: bool [width], False for rows of the head that belong to no token.
    """

    def __init__(
        self, logits: Float[Tensor, "positions width"], real_ids: Bool[Tensor, "width"]
    ) -> None:
        self._graph = logits
        rows = logits if logits.dtype == torch.float64 else logits.float()
        rows = rows.masked_fill(~real_ids, -torch.inf)
        # From the row's peak: normalisers are then small, and a tail of 1e-5 survives float32.
        self._logits = rows - rows.detach().amax(dim=1, keepdim=True)
        self._log_normalisers: dict[float, Tensor] = {}

    @property
    def positions(self) -> int:
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
        self, positions: Int64[Tensor, "n"], ids: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n"]:
        """See ``StudentLogprobs``."""
        return (
            self._logits[positions, ids] / temperature - self._normalisers(temperature)[positions]
        )

    def range_logmasses(
        self,
        positions: Int64[Tensor, "n"],
        starts: Int64[Tensor, "n"],
        stops: Int64[Tensor, "n"],
        ids: Int64[Tensor, "m"],
        *,
        temperature: float = 1.0,
    ) -> Float[Tensor, "n"]:
        """See ``StudentLogprobs``."""
        return range_logmasses(self, positions, starts, stops, ids, temperature=temperature)

    def whole_rows(
        self, positions: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n width"]:
        """See ``StudentLogprobs``."""
        return (
            self._logits[positions] / temperature - self._normalisers(temperature)[positions, None]
        )

    def zeros(self) -> Float[Tensor, "positions"]:
        """See ``StudentLogprobs``."""
        # An empty sum: zero even where logits are not finite.
        return self._graph[:, :0].sum(dim=1).to(self.dtype)

    def most_likely_ids(
        self, positions: Int64[Tensor, "n"], allowed: Bool[Tensor, "width"], count: int
    ) -> Int64[Tensor, "n most"]:
        """See ``StudentLogprobs``."""
        return most_likely_ids(self._logits, positions, allowed, count)

    def _normalisers(self, temperature: float) -> Float[Tensor, "positions"]:
        if temperature not in self._log_normalisers:
            self._log_normalisers[temperature] = (self._logits / temperature).logsumexp(dim=1)
        return self._log_normalisers[temperature]


class DerivedRows:
    """Width, device and precision of rows that are computed from a student's."""

    def __init__(self, student: StudentLogprobs) -> None:
        self._student = student

    @property
    def width(self) -> int:
        """See ``StudentLogprobs``."""
        return self._student.width

    @property
    def device(self) -> torch.device:
        """See ``StudentLogprobs``."""
        return self._student.device

    @property
    def dtype(self) -> torch.dtype:
        """See ``StudentLogprobs``."""
        return self._student.dtype


def range_logmasses(
    student: StudentLogprobs,
    positions: Int64[Tensor, "n"],
    starts: Int64[Tensor, "n"],
    stops: Int64[Tensor, "n"],
    ids: Int64[Tensor, "m"],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, "n"]:
    """``StudentLogprobs.range_logmasses`` by reading every id of every range."""
    numbers, members = expand_ranges(starts, stops)
    logprobs = student.logprobs(positions[numbers], ids[members], temperature=temperature)
    return segment_logsumexp(logprobs, numbers, len(positions))


def most_likely_ids(
    logits: Float[Tensor, "positions width"],
    positions: Int64[Tensor, "n"],
    allowed: Bool[Tensor, "width"],
    count: int,
) -> Int64[Tensor, "n most"]:
    """``StudentLogprobs.most_likely_ids`` of [positions, width] logits; copies few rows at once."""
    chosen: list[Tensor] = []
    for part in positions.split(_RANKED_ROWS):
        rows = logits.detach()[part].masked_fill_(~allowed, -torch.inf)
        values, ids = rows.topk(min(count, logits.shape[1]), dim=1)
        chosen.append(ids.masked_fill_(torch.isneginf(values), -1))
    return torch.cat(chosen)
