"""Random top-k targets in float64, and the loss on them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopd_losses.config import Direction, TopKDivergenceSettings
from mopd_losses.core.loss import LossOutput
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.projection.cache import DeviceProjection
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss
from mopd_losses.topk.topk_targets import TopKTargets

DIVERGENCES: tuple[Direction, ...] = ("forward_kl", "reverse_kl")

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Problem:
    """Logits of one completion, and a teacher's top-k at some of its tokens."""

    logits: Tensor  # [tokens, student width]
    targets: TopKTargets
    weights: Floats  # [student width, teacher size]
    real: NDArray[np.bool_]  # [student width]

    def projection(self) -> DeviceProjection:
        """``weights`` as losses read a projection."""
        return device_projection(self.weights, self.real)

    def loss(
        self, settings: TopKDivergenceSettings, teacher_temperature: float = 1.0
    ) -> LossOutput:
        """Apply the loss with these settings."""
        loss = TopKDivergenceLoss(self.projection(), settings, teacher_temperature)
        return loss(DenseRows(self.logits, torch.tensor(self.real)), self.targets)


def topk_loss(
    logits: Tensor,
    targets: TopKTargets,
    settings: TopKDivergenceSettings | None = None,
    projection: DeviceProjection | None = None,
    teacher_temperature: float = 1.0,
) -> LossOutput:
    """Apply the loss to logits [tokens, width]; the identity is the default projection."""
    projection = projection or identity(logits.shape[1])
    settings = settings or TopKDivergenceSettings()
    loss = TopKDivergenceLoss(projection, settings, teacher_temperature)
    return loss(DenseRows(logits, projection.real_ids), targets)


def device_projection(weights: Floats, real: NDArray[np.bool_]) -> DeviceProjection:
    """Convert a dense matrix to the form that losses read, without rounding to float32."""
    students, columns = np.nonzero(weights)
    order = np.lexsort((students, columns))
    counts = np.bincount(columns, minlength=weights.shape[1])
    return DeviceProjection(
        column_starts=torch.tensor(np.concatenate([[0], np.cumsum(counts)])),
        student_ids=torch.tensor(students[order]),
        log_weights=torch.tensor(np.log(weights[students, columns][order])),
        real_ids=torch.tensor(real),
        unprojected_ids=torch.tensor(np.flatnonzero(real & ~weights.any(axis=1))),
    )


def identity(size: int) -> DeviceProjection:
    """Return the projection of a vocabulary on itself."""
    return device_projection(np.eye(size), np.ones(size, dtype=np.bool_))


def targets_of(
    teacher: Floats, kept: list[list[int]], positions: list[int] | None = None
) -> TopKTargets:
    """Cut rows of probabilities to the ids in ``kept``; short rows end in missing entries."""
    width = max((len(row) for row in kept), default=0)
    ids = torch.full((len(kept), width), -1)
    logprobs = torch.full((len(kept), width), -torch.inf, dtype=torch.float64)
    tails = torch.zeros(len(kept), dtype=torch.float64)
    for at, row in enumerate(kept):
        ids[at, : len(row)] = torch.tensor(row, dtype=torch.int64)
        logprobs[at, : len(row)] = torch.tensor(teacher[at, row]).log()
        tails[at] = torch.tensor(np.delete(teacher[at], row).sum()).log()
    position_ids = torch.tensor(
        range(len(kept)) if positions is None else positions, dtype=torch.int64
    )
    return TopKTargets(position_ids, ids, logprobs, tails)


def random_problem(seed: int) -> Problem:
    """Any mix of multi-column, one-hot and empty rows, unreached columns, padding and scales."""
    draw = np.random.default_rng(seed)
    student_size, teacher_size = draw.integers(1, 12, size=2)
    padding, tokens = draw.integers(0, 4), draw.integers(1, 6)
    weights = np.zeros((student_size + padding, teacher_size))
    for row in weights[:student_size]:
        spread = min(draw.choice([0, 1, 1, 1, 2, 4]), teacher_size)
        row[draw.choice(teacher_size, spread, replace=False)] = draw.dirichlet(np.ones(spread))
    real = np.arange(student_size + padding) < student_size
    real[0] = True
    logits = draw.normal(size=(*weights.shape[:1], tokens)).T * draw.choice([0.3, 2, 20])
    places = draw.integers(0, tokens + 1)
    positions = sorted(draw.choice(tokens, places, replace=False).tolist())
    teacher = draw.dirichlet(np.full(teacher_size, draw.choice([0.05, 0.5, 5])), size=places)
    teacher = np.maximum(teacher, 1e-30)
    most = draw.integers(0, teacher_size + 1)
    kept = [
        draw.choice(teacher_size, draw.integers(0, most + 1), replace=False).tolist()
        for _ in range(places)
    ]
    targets = targets_of(teacher, kept, positions)
    shuffled = torch.tensor(draw.permutation(targets.ids.shape[1]), dtype=torch.int64)
    targets = TopKTargets(
        targets.positions,
        targets.ids[:, shuffled],
        targets.logprobs[:, shuffled],
        targets.tail_logprobs,
    )
    return Problem(torch.tensor(logits), targets, weights, real)
