"""``OneEndLoss``: another loss, which compares the end of a turn as one event."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mopd_losses.core.loss import AlignedPair, Loss, LossOutput, Targets
from mopd_losses.core.span_targets import SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.core.targets import RowTargets
from mopd_losses.ends.end_event import EndEvent, KnownEnds
from mopd_losses.ends.one_end_rows import OneEndRows


@dataclass(frozen=True, eq=False)
class EndRows(RowTargets):
    """Positions at which a teacher's mass of the end is known in part, or the student ended."""

    positions: Int64[Tensor, "rows"]
    known: Float[Tensor, "rows"]  # nats
    most: Float[Tensor, "rows"]  # nats
    sampled_ids: Int64[Tensor, "rows"]  # the id that ends the completion; -1 elsewhere


@dataclass(frozen=True, eq=False)
class OneEndTargets:
    """Targets of a loss in renamed ids, and what is known of the ends."""

    inner: Targets
    ends: EndRows

    def to(self, device: torch.device | str) -> "OneEndTargets":
        """See ``Targets``."""
        return OneEndTargets(self.inner.to(device), self.ends.to(device))

    def between(self, start: int, stop: int) -> "OneEndTargets":
        """See ``Targets``."""
        return OneEndTargets(self.inner.between(start, stop), self.ends.between(start, stop))

    def uncuttable(self, positions: int) -> Tensor:
        """See ``Targets``."""
        return self.inner.uncuttable(positions)


@dataclass(frozen=True, eq=False)
class OneEndLoss:
    """A loss on renamed scores and rows with one end: a ``Loss``."""

    inner: Loss
    event: EndEvent

    def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> OneEndTargets:
        """See ``Loss``."""
        renamed = [self.event.of(pair) for pair in comparisons]
        rows = [
            _rows(pair, ends, self.event.student_ids, offset)
            for pair, (_, ends), offset in zip(comparisons, renamed, offsets, strict=True)
        ]
        columns = [np.concatenate(column) for column in zip(_NO_ROWS, *rows, strict=True)]
        return OneEndTargets(
            self.inner.targets([pair for pair, _ in renamed], offsets),
            EndRows(*map(torch.from_numpy, columns)),
        )

    def __call__(self, student: StudentLogprobs, targets: OneEndTargets) -> LossOutput:
        """See ``Loss``."""
        ends = targets.ends
        nothing = torch.full_like(student.zeros().detach(), -torch.inf)
        rows = OneEndRows(
            student,
            self.event.student_ids,
            nothing.index_copy(0, ends.positions, ends.known.to(student.dtype)),
            nothing.index_copy(0, ends.positions, ends.most.to(student.dtype)),
        )
        inner: Any = targets.inner
        if isinstance(inner, SpanTargets):
            inner = _with_sampled_ends(inner, ends, student, rows, self.event.student_ids[0])
        return self.inner(rows, inner)


def _with_sampled_ends(
    targets: SpanTargets, ends: EndRows, student: StudentLogprobs, rows: OneEndRows, end: int
) -> SpanTargets:
    """Return targets whose ratio of the current to the sampled probability of an end is that of
    the sampled token: the sampled probability of the event is unknown."""
    at = ends.sampled_ids >= 0
    positions, ids = ends.positions[at], ends.sampled_ids[at]
    # With gradients: rows keep their normalisers for later readings.
    added = rows.logprobs(positions, torch.full_like(ids, end)) - student.logprobs(positions, ids)
    added = added.detach()
    sampled = targets.sampled_logprobs.index_add(
        0, positions, added.to(targets.sampled_logprobs.dtype)
    )
    return replace(targets, sampled_logprobs=sampled)


def _rows(
    pair: AlignedPair, ends: KnownEnds, student_ids: Sequence[int], offset: int
) -> tuple[np.ndarray, ...]:
    """Return the columns of ``EndRows`` of one completion."""
    spans, tokens = pair.alignment, pair.student.token_ids
    known, most = np.full((2, len(tokens)), -np.inf)
    # The last row of a span first: most losses read the first one.
    for positions, rows in (
        (spans.student_ends - 1, spans.teacher_ends - 1),
        (spans.student_starts, spans.teacher_starts),
    ):
        known[positions], most[positions] = ends.known[rows], ends.most[rows]
    is_sampled = np.isin(tokens, student_ids) & (pair.sampled_logprobs is not None)
    at = np.flatnonzero(is_sampled | ~np.isneginf(most))
    sampled = np.where(is_sampled, tokens, -1)[at].astype(np.int64)
    return at + offset, known[at], most[at], sampled


_NO_ROWS = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
