"""``CtkdLoss``: the student's projected distribution against a teacher's top-k, by event.

At the start of a span both sides predict the same text. The student's distribution is projected on
teacher ids (X-Token, arXiv 2605.21699) and compared with the teacher's top-k, where ids that are
one event for these tokenizers (``teacher_events``) are added up on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from mopd_losses.core.loss import AlignedPair, LossOutput
from mopd_losses.core.segments import segment_logsumexp
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.core.targets import RowTargets
from mopd_losses.divergences.truncation import log_mass
from mopd_losses.projection.projected_logprobs import projected_logprobs
from mopd_losses.topk.pooled_entries import pooled_entries
from mopd_losses.topk.teacher_events import TeacherEvents
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss


@dataclass(frozen=True, eq=False)
class CtkdTargets(RowTargets):
    """Teacher distributions on events; missing entries are ``-1`` with ``-inf``."""

    positions: Int64[Tensor, "compared"]  # student tokens that the rows predict
    realised_ids: Int64[Tensor, "compared members"]  # teacher ids of the realised event
    unnamed_ids: Int64[Tensor, "compared"]  # the student's token if no teacher id names it
    ids: Int64[Tensor, "compared others"]  # a teacher id for each other event
    realised_logprobs: Float[Tensor, "compared"]  # nats
    logprobs: Float[Tensor, "compared others"]  # nats
    tail_logprobs: Float[Tensor, "compared"]  # nats: log of the mass outside all events


@dataclass(frozen=True, eq=False)
class CtkdLoss:
    """A divergence from a projected top-k on events: a ``Loss``.

    Args:
        topk: the divergence, its settings and the projection.
        events: of that projection.
    """

    topk: TopKDivergenceLoss
    events: TeacherEvents

    def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> CtkdTargets:
        """See ``Loss``."""
        return ctkd_targets(comparisons, offsets, self.events)

    def __call__(self, student: StudentLogprobs, targets: CtkdTargets) -> LossOutput:
        """See ``Loss``; ``measured`` is that of ``TopKDivergenceLoss``."""
        self.topk.require_width(student)
        members = targets.realised_ids.shape[1]
        projected = projected_logprobs(
            student,
            targets.positions,
            torch.cat([targets.realised_ids, targets.ids], dim=1),
            self.topk.projection,
            temperature=self.topk.temperature,
        )
        rows = torch.arange(len(projected), device=projected.device)
        unnamed = torch.nonzero(targets.unnamed_ids >= 0).flatten()
        own = student.logprobs(
            targets.positions[unnamed],
            targets.unnamed_ids[unnamed],
            temperature=self.topk.temperature,
        )
        realised = segment_logsumexp(
            torch.cat([projected[:, :members].flatten(), own]),
            torch.cat([rows.repeat_interleave(members), unnamed]),
            len(projected),
        ).unsqueeze(1)
        return self.topk.compare(
            student,
            targets.positions,
            torch.cat([realised, projected[:, members:]], dim=1),
            torch.cat([targets.realised_logprobs.unsqueeze(1), targets.logprobs], dim=1),
            targets.tail_logprobs,
        )


def ctkd_targets(
    comparisons: Sequence[AlignedPair], offsets: Sequence[int], events: TeacherEvents
) -> CtkdTargets:
    """Build the targets of several completions."""
    rows = [
        _Rows.of(pair, offset, events) for pair, offset in zip(comparisons, offsets, strict=True)
    ]
    ids = _stacked([part.ids for part in rows], -1)
    nats = _stacked([part.nats for part in rows], -np.inf)
    members = _stacked([part.members for part in rows], -1)
    is_member = (ids[:, :, None] == members[:, None, :]).any(dim=2) & (ids >= 0)
    others, logprobs = pooled_entries(
        torch.arange(len(ids)), ids.masked_fill(is_member, -1), nats, len(ids)
    )
    return CtkdTargets(
        positions=torch.from_numpy(np.concatenate([_NO_IDS, *(part.positions for part in rows)])),
        realised_ids=members,
        unnamed_ids=torch.from_numpy(np.concatenate([_NO_IDS, *(part.unnamed for part in rows)])),
        ids=others,
        realised_logprobs=log_mass(nats.masked_fill(~is_member, -torch.inf)),
        logprobs=logprobs,
        tail_logprobs=torch.from_numpy(np.concatenate([_NO_NATS, *(part.tails for part in rows)])),
    )


@dataclass(frozen=True, eq=False)
class _Rows:
    """The first rows of one completion's spans."""

    positions: NDArray[np.int64]  # [spans]
    ids: NDArray[np.int64]  # [spans, k + 1], representatives
    nats: NDArray[np.float64]  # [spans, k + 1]
    tails: NDArray[np.float64]  # [spans]
    members: NDArray[np.int64]  # [spans, members]
    unnamed: NDArray[np.int64]  # [spans], see ``CtkdTargets.unnamed_ids``

    @classmethod
    def of(cls, pair: AlignedPair, offset: int, events: TeacherEvents) -> "_Rows":
        at, rows = pair.alignment.student_starts, pair.alignment.teacher_starts
        topk = pair.score.topk
        own = pair.student.token_ids[at].astype(np.int64)
        realised = pair.score.completion.token_ids[rows].astype(np.int64)
        realised_nats = topk.token_logprobs[rows].astype(np.float64)
        ids, nats = topk.ids[rows].astype(np.int64), topk.logprobs[rows].astype(np.float64)
        tails = topk.tail_logprobs[rows].astype(np.float64)
        # The realised token is one more entry where the tail contains it.
        outside = ~(ids == realised[:, None]).any(axis=1)
        remaining = np.exp(tails) - np.where(outside, np.exp(realised_nats), 0.0)
        with np.errstate(divide="ignore"):
            tails = np.where(outside, np.log(np.maximum(remaining, 0.0)), tails)
        ids = np.column_stack([ids, np.where(outside, realised, -1)])
        return cls(
            positions=at.astype(np.int64) + offset,
            ids=np.where(ids >= 0, events.representatives[np.maximum(ids, 0)], -1),
            nats=np.column_stack([nats, np.where(outside, realised_nats, -np.inf)]),
            tails=tails,
            members=events.realised(own, realised),
            unnamed=np.where(events.are_named(own), -1, own),
        )


def _stacked(parts: Sequence[NDArray[np.int64] | NDArray[np.float64]], fill: float) -> Tensor:
    """Rows of all parts; parts with fewer columns are padded."""
    width = max((part.shape[1] for part in parts), default=0)
    empty = torch.full((0, width), fill, dtype=torch.int64 if fill == -1 else torch.float64)
    padded = (
        torch.nn.functional.pad(torch.from_numpy(part), (0, width - part.shape[1]), value=fill)
        for part in parts
    )
    return torch.cat([empty, *padded])


_NO_IDS = np.zeros(0, dtype=np.int64)
_NO_NATS = np.zeros(0)
