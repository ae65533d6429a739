"""``OneEndRows``: a student's distributions with one id for all tokens that end a completion."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mopd_losses.core.segments import segment_logsumexp
from mopd_losses.core.student_rows import DerivedRows, StudentLogprobs, range_logmasses


class OneEndRows(DerivedRows):
    """The probability of all ids that end, under the first of them; the others have none.

    Args:
        ends: the ids.
        known: [positions], what a teacher's top-k contains of its mass of the end; default: all.
        most: [positions], how much more of it may be in the teacher's tail. As much of the
            student's mass of the end belongs to its tail, too: the smallest difference that these
            bounds allow is what is compared.
    """

    def __init__(
        self,
        student: StudentLogprobs,
        ends: Sequence[int],
        known: Float[Tensor, "positions"] | None = None,
        most: Float[Tensor, "positions"] | None = None,
    ) -> None:
        super().__init__(student)
        self._ends = torch.tensor(ends, device=student.device)
        self._known = known
        self._most = most

    @property
    def positions(self) -> int:
        """See ``StudentLogprobs``."""
        return self._student.positions

    def logprobs(
        self, positions: Int64[Tensor, "n"], ids: Int64[Tensor, "n"], *, temperature: float = 1.0
    ) -> Float[Tensor, "n"]:
        """See ``StudentLogprobs``."""
        read = self._student.logprobs(positions, ids, temperature=temperature)
        read = read.masked_fill(torch.isin(ids, self._ends[1:]), -torch.inf)
        (at,) = (ids == self._ends[0]).nonzero(as_tuple=True)
        if not len(at):
            return read
        return read.index_put((at,), self._end_logprobs(positions[at], temperature))

    def _end_logprobs(self, positions: Int64[Tensor, "n"], temperature: float) -> Tensor:
        """[n], nats, of the event."""
        count = len(self._ends)
        segments = torch.arange(len(positions), device=self.device).repeat_interleave(count)
        each = self._student.logprobs(
            positions.repeat_interleave(count),
            self._ends.repeat(len(positions)),
            temperature=temperature,
        )
        nats = segment_logsumexp(each, segments, len(positions))
        if self._known is None or self._most is None:
            return nats
        most = self._most[positions].exp()
        excess = nats.detach().exp() - self._known[positions].exp()
        unknown = excess.clamp_min(0).minimum(most)
        # Only where something is subtracted: the event may have no mass at all.
        bounded = (torch.where(unknown > 0, nats.exp() - unknown, 1.0)).log()
        return torch.where(unknown > 0, bounded, nats)

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
        """See ``StudentLogprobs``; without the bounds, which belong to a top-k."""
        rows = self._student.whole_rows(positions, temperature=temperature)
        ends = rows[:, self._ends].logsumexp(dim=1, keepdim=True)
        nothing = torch.full_like(ends, -torch.inf).expand(-1, len(self._ends) - 1)
        return rows.index_copy(1, self._ends, torch.cat([ends, nothing], dim=1))

    def zeros(self) -> Float[Tensor, "positions"]:
        """See ``StudentLogprobs``."""
        return self._student.zeros()

    def most_likely_ids(
        self, positions: Int64[Tensor, "n"], allowed: Bool[Tensor, "width"], count: int
    ) -> Int64[Tensor, "n most"]:
        """See ``StudentLogprobs``."""
        others = allowed.index_fill(0, self._ends, value=False)
        ids = self._student.most_likely_ids(positions, others, count)
        if not allowed[self._ends[0]] or not ids.shape[1]:
            return ids
        ids = torch.cat([ids, self._ends[:1].expand(len(ids), 1)], dim=1)
        places = positions.repeat_interleave(ids.shape[1])
        nats = self.logprobs(places, ids.clamp_min(0).flatten()).view(ids.shape)
        nats = nats.detach().masked_fill(ids < 0, -torch.inf)
        order = nats.argsort(dim=1, descending=True, stable=True)[:, :count]
        return ids.gather(1, order).masked_fill(torch.isneginf(nats.gather(1, order)), -1)
