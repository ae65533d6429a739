"""The language-model head and its losses, computed a block of rows at a time.

A head of 150,000 rows makes logits that are far larger than everything else in a training step.
Here, logits of at most ``rows_per_block`` rows exist at once: the logits of a block are computed,
every loss reads entries of them, and their gradient is formed in the same memory and multiplied out
to the hidden states and the head before the next block begins. The gradient of a block is

    dZ[s, v] = p[s, v] * dL/d(lse[s]) + sum of dL/d(z) over the entries that a loss read at (s, v),

dense in the first term and sparse in the second, so distillation costs what plain cross entropy
costs, for any size of the teacher's vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mopd_losses.core.loss import LossOutput, Targets
from mopd_losses.core.segments import expand_ranges, segment_logsumexp
from mopd_losses.core.student_rows import DenseRows, StudentLogprobs, most_likely_ids

ROWS_PER_BLOCK = 1024

#: Ids of ranges that are read at once.
_RANGE_MEMBERS = 1 << 20


@dataclass(frozen=True, eq=False)
class LossTerm:
    """A loss, its targets, and the weight of each position in the total."""

    loss: Callable[[StudentLogprobs, Any], LossOutput]
    targets: Targets
    position_weights: Float[Tensor, "positions"]


@dataclass(frozen=True, eq=False)
class Head:
    """A language-model head: ``logits = cap(scale * (hidden @ weight.T + bias))``."""

    weight: Float[Tensor, "width hidden_size"]  # may be the input embedding (tied)
    real_ids: Bool[Tensor, "width"]  # False for rows that belong to no token
    bias: Float[Tensor, "width"] | None = None
    scale: float = 1.0
    soft_cap: float | None = None  # c * tanh(logits / c)

    def logits(self, hidden: Float[Tensor, "rows hidden_size"]) -> Float[Tensor, "rows width"]:
        """Compute logits without a gradient; ``-inf`` for rows of the head that belong to no token.

        Returns:
            [rows, width], float64 if ``hidden`` is, else float32.
        """
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        with torch.no_grad():
            logits = _product(hidden, self.weight.to(hidden.dtype).t(), exact)
            logits = logits if self.bias is None else logits + self.bias
            logits = logits * self.scale if self.scale != 1.0 else logits
            if self.soft_cap is not None:
                logits = (logits / self.soft_cap).tanh() * self.soft_cap
            return logits.masked_fill(~self.real_ids, -torch.inf)


def blockwise_head(
    hidden: Float[Tensor, "positions hidden"],
    head: Head,
    terms: Sequence[LossTerm],
    *,
    rows_per_block: int = ROWS_PER_BLOCK,
) -> tuple[Float[Tensor, ""], list[LossOutput]]:
    """Compute the weighted sum of all losses over all positions, and the output of each loss.

    Gradients are computed in the forward pass; the backward pass only scales them. Products are
    computed in the precision of ``hidden`` and summed in float32.

    Args:
        hidden: [positions, hidden size], only the rows that predict completion tokens.
        rows_per_block: maximum number of rows whose logits exist at once; exceeded only by a single
            span that is longer.

    Returns:
        A scalar in nats, with a graph to ``hidden``, ``head.weight`` and ``head.bias``; and a
        detached ``LossOutput`` for each term.
    """
    outputs: list[LossOutput] = []
    total = _BlockwiseHead.apply(
        hidden, head.weight, head.bias, head, list(terms), rows_per_block, outputs
    )
    assert isinstance(total, Tensor)
    return total, outputs


def dense_head(
    logits: Float[Tensor, "positions width"],
    real_ids: Bool[Tensor, "width"],
    terms: Sequence[LossTerm],
) -> tuple[Float[Tensor, ""], list[LossOutput]]:
    """Compute what ``blockwise_head`` returns from a model's logits, under autograd.

    For models with another head than ``Head`` supports, at the memory cost of dense logits.

    Args:
        logits: [positions, width].
        real_ids: bool [width].
    """
    student = DenseRows(logits, real_ids)
    total = student.zeros().sum()
    outputs: list[LossOutput] = []
    for term in terms:
        output = term.loss(student, term.targets)
        total = total + (output.per_token * term.position_weights.to(output.per_token.dtype)).sum()
        outputs.append(replace(output, per_token=output.per_token.detach()))
    return total, outputs


class _BlockwiseHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        terms: list[LossTerm],
        rows_per_block: int,
        outputs: list[LossOutput],
    ) -> Tensor:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=exact, device=hidden.device)
        hidden_gradient = torch.zeros_like(hidden, dtype=exact)
        # An untrained head costs neither the memory nor the products of its gradient.
        weight_gradient = torch.zeros_like(weight, dtype=exact) if weight.requires_grad else None
        bias_gradient = None
        if bias is not None and bias.requires_grad:
            bias_gradient = torch.zeros_like(bias, dtype=exact)
        parts: list[list[LossOutput]] = [[] for _ in terms]
        # Products are in the precision of the rows. Only CUDA sums those of half precision in
        # float32; elsewhere the head is converted once, not for every block.
        precision = hidden.dtype if hidden.device.type == "cuda" else exact
        matrix = weight.detach().to(hidden.dtype).to(precision)
        for start, stop in _blocks(terms, len(hidden), rows_per_block):
            inputs = hidden[start:stop].to(precision)
            block = _Block(inputs, matrix, head, exact)
            with torch.enable_grad():
                value = torch.zeros((), dtype=exact, device=hidden.device)
                for term, blocks in zip(terms, parts, strict=True):
                    output = term.loss(block, term.targets.between(start, stop))
                    weights = term.position_weights[start:stop].to(output.per_token.dtype)
                    value = value + (output.per_token * weights).sum()
                    blocks.append(replace(output, per_token=output.per_token.detach()))
            total += value.detach()
            gradient = block.logit_gradient(value)
            if bias_gradient is not None:
                bias_gradient += gradient.sum(dim=0)
            gradient = gradient.to(precision)
            hidden_gradient[start:stop] = _product(gradient, matrix, exact)
            if weight_gradient is None:
                continue
            if gradient.dtype == exact:  # in place, without a second matrix of the head's size
                weight_gradient.addmm_(gradient.t(), inputs)
            else:
                weight_gradient += _product(gradient.t(), inputs, exact)
        outputs += [_joined(blocks, len(hidden), exact, hidden.device) for blocks in parts]
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        ctx.save_for_backward(hidden_gradient.to(hidden.dtype), weight_gradient, bias_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        (output_gradient,) = outputs
        gradients = ctx.saved_tensors
        if output_gradient != 1:  # no copies if the total is the loss
            gradients = [
                None if gradient is None else gradient * output_gradient.to(gradient.dtype)
                for gradient in gradients
            ]
        return (*gradients, None, None, None, None)


@dataclass(frozen=True, eq=False)
class _Ranges:
    """Ranges of ids that are summed, expanded to their members a chunk at a time."""

    positions: Tensor  # int64 [n]
    starts: Tensor  # int64 [n], in ``ids``
    stops: Tensor  # int64 [n]
    ids: Tensor  # int64 [m]
    temperature: float

    def chunks(self, width: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield ranges, with each member's number of its range in the chunk and flat index."""
        counts = (self.stops - self.starts).cumsum(0)
        start, done = 0, 0
        while start < len(counts):
            stop = int(torch.searchsorted(counts, done + _RANGE_MEMBERS, right=True))
            part = slice(start, max(stop, start + 1))
            numbers, members = expand_ranges(self.starts[part], self.stops[part])
            yield part, numbers, self.positions[part][numbers] * width + self.ids[members]
            start, done = part.stop, int(counts[part.stop - 1])


class _Block:
    """``StudentLogprobs`` of one block of logits; records the entries read, for the gradient."""

    def __init__(self, hidden: Tensor, matrix: Tensor, head: Head, dtype: torch.dtype) -> None:
        self._head = head
        logits = _product(hidden, matrix.t(), dtype)
        if head.bias is not None:
            logits += head.bias
        if head.scale != 1.0:
            logits *= head.scale
        self._squashed: Tensor | None = None  # tanh(logits / cap), for the cap's derivative
        if head.soft_cap is not None:
            self._squashed = (logits / head.soft_cap).tanh_()
            logits = self._squashed * head.soft_cap
        logits.masked_fill_(~head.real_ids, -torch.inf)
        logits -= logits.amax(dim=1, keepdim=True)
        self._logits = logits
        # One leaf per temperature and one per reading: the only inputs of autograd in this block.
        self._log_normalisers: dict[float, Tensor] = {}
        self._readings: list[tuple[Tensor, Tensor]] = []  # (flat index, logits read)
        self._row_readings: list[tuple[Tensor, Tensor]] = []  # (position, full row)
        self._range_readings: list[tuple[_Ranges, Tensor]] = []  # (ranges, log of their sums)
        self._zeros = torch.zeros(len(hidden), dtype=dtype, device=hidden.device)

    @property
    def positions(self) -> int:
        return self._logits.shape[0]

    @property
    def width(self) -> int:
        return self._logits.shape[1]

    @property
    def device(self) -> torch.device:
        return self._logits.device

    @property
    def dtype(self) -> torch.dtype:
        return self._logits.dtype

    def zeros(self) -> Float[Tensor, "positions"]:
        return self._zeros

    def logprobs(
        self, positions: Int64[Tensor, "n"], ids: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n"]:
        log_normalisers = self._normalisers(temperature)
        logits = self._logits[positions, ids]
        if torch.is_grad_enabled():
            self._readings.append((positions * self.width + ids, logits.requires_grad_()))
        return logits / temperature - log_normalisers[positions]

    def most_likely_ids(
        self, positions: Int64[Tensor, "n"], allowed: Bool[Tensor, "width"], count: int
    ) -> Int64[Tensor, "n most"]:
        return most_likely_ids(self._logits, positions, allowed, count)

    def range_logmasses(
        self,
        positions: Int64[Tensor, "n"],
        starts: Int64[Tensor, "n"],
        stops: Int64[Tensor, "n"],
        ids: Int64[Tensor, "m"],
        *,
        temperature: float = 1.0,
    ) -> Float[Tensor, "n"]:
        log_normalisers = self._normalisers(temperature)
        ranges = _Ranges(positions, starts, stops, ids, temperature)
        sums = torch.full((len(positions),), -torch.inf, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            for part, numbers, indices in ranges.chunks(self.width):
                logits = self._logits.view(-1)[indices] / temperature
                sums[part] = segment_logsumexp(logits, numbers, part.stop - part.start)
        if torch.is_grad_enabled():
            self._range_readings.append((ranges, sums.requires_grad_()))
        return sums - log_normalisers[positions]

    def whole_rows(
        self, positions: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n width"]:
        log_normalisers = self._normalisers(temperature)
        logits = self._logits[positions]
        if torch.is_grad_enabled():
            self._row_readings.append((positions, logits.requires_grad_()))
        return logits / temperature - log_normalisers[positions, None]

    def _normalisers(self, temperature: float) -> Float[Tensor, "positions"]:
        if temperature not in self._log_normalisers:
            with torch.no_grad():
                logits = self._logits if temperature == 1.0 else self._logits / temperature
                normalisers = logits.logsumexp(dim=1)
            self._log_normalisers[temperature] = normalisers.requires_grad_()
        return self._log_normalisers[temperature]

    def logit_gradient(self, value: Float[Tensor, ""]) -> Float[Tensor, "positions width"]:
        """[positions, width], the gradient of ``value`` by the logits, in the logits' memory."""
        normalisers = list(self._log_normalisers.items())
        readings = [*self._readings, *self._row_readings]
        leaves = [leaf for _, leaf in normalisers] + [read for _, read in readings]
        leaves += [sums for _, sums in self._range_readings]
        if not value.requires_grad:
            return self._logits.zero_()
        # Not in the annotation: the gradient of an unused leaf is None.
        gradients = cast(
            Sequence[Tensor | None], torch.autograd.grad(value, leaves, allow_unused=True)
        )
        by_sums = gradients[len(normalisers) + len(readings) :]
        range_gradients = [
            (ranges, self._range_gradient(ranges, sums.detach(), by_sum))
            for (ranges, sums), by_sum in zip(self._range_readings, by_sums, strict=True)
            if by_sum is not None
        ]
        gradient = self._dense_gradient(
            [(t, leaf.detach(), g) for (t, leaf), g in zip(normalisers, gradients, strict=False)]
        )
        flat = gradient.view(-1)
        for (indices, _), by_reading in zip(readings, gradients[len(normalisers) :], strict=False):
            if by_reading is not None:
                read_from = flat if by_reading.ndim == 1 else gradient
                read_from.index_add_(0, indices, by_reading)
        for ranges, by_member in range_gradients:
            chunks = zip(ranges.chunks(self.width), by_member, strict=True)
            for (_, _, indices), values in chunks:
                flat.index_add_(0, indices, values)
        if self._squashed is not None:
            gradient *= 1 - self._squashed.square_()
        if self._head.scale != 1.0:
            gradient *= self._head.scale
        return gradient

    def _range_gradient(self, ranges: "_Ranges", sums: Tensor, by_sum: Tensor) -> list[Tensor]:
        """Return the gradient by the logits of each chunk, from the logits of the block."""
        shifts = torch.where(torch.isneginf(sums), 0.0, sums)
        values: list[Tensor] = []
        for part, numbers, indices in ranges.chunks(self.width):
            shares = self._logits.view(-1)[indices] / ranges.temperature - shifts[part][numbers]
            values.append(shares.exp_() * (by_sum[part] / ranges.temperature)[numbers])
        return values

    def _dense_gradient(self, normalisers: list[tuple[float, Tensor, Tensor | None]]) -> Tensor:
        """Return the softmax of every row times the gradient of its normaliser."""
        *others, (temperature, log_normaliser, by_normaliser) = normalisers
        extra = [
            ((self._logits / t - n[:, None]).exp_(), g / t) for t, n, g in others if g is not None
        ]
        gradient = self._logits
        if temperature != 1.0:
            gradient /= temperature
        gradient -= log_normaliser[:, None]
        gradient.exp_()
        gradient *= 0.0 if by_normaliser is None else by_normaliser[:, None] / temperature
        for probabilities, factor in extra:
            gradient += probabilities * factor[:, None]
        return gradient


def _blocks(terms: Sequence[LossTerm], positions: int, rows: int) -> list[tuple[int, int]]:
    """Split positions into ranges of at most ``rows``; none ends where a loss forbids a cut."""
    uncuttable = torch.zeros(positions + 1, dtype=torch.bool)
    for term in terms:
        uncuttable |= term.targets.uncuttable(positions).cpu()
    cuts = torch.nonzero(~uncuttable).flatten().tolist()
    blocks: list[tuple[int, int]] = []
    start = 0
    while start < positions:
        inside = [cut for cut in cuts if start < cut <= start + rows]
        stop = inside[-1] if inside else next(cut for cut in cuts if cut > start)
        blocks.append((start, stop))
        start = stop
    return blocks


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``left @ right``, accumulated in ``dtype``."""
    if left.dtype == dtype:
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _joined(
    parts: Sequence[LossOutput], positions: int, dtype: torch.dtype, device: torch.device
) -> LossOutput:
    if not parts:
        zeros = torch.zeros(positions, dtype=dtype, device=device)
        return LossOutput(zeros, zeros)
    names = parts[0].measured
    return LossOutput(
        torch.cat([part.per_token for part in parts]),
        torch.cat([part.compared for part in parts]),
        {name: torch.cat([part.measured[name] for part in parts]) for name in names},
    )
