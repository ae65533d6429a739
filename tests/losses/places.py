"""Random places where a student and a teacher are compared, in float64, and what they cost."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopd_losses.core.loss_output import LossOutput
from mopd_losses.projection.cache import DeviceProjection
from mopd_losses.topk.ctkd import Divergence
from mopd_losses.topk.topk_targets import TopKTargets
from tests.losses.dense import ctkd
from tests.reference.ctkd import Place, place

DIVERGENCES: tuple[Divergence, ...] = ("forward_kl", "reverse_kl")

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Problem:
    """Logits of one completion and a teacher's top-k at some of its tokens."""

    logits: Tensor  # [tokens, student width]
    targets: TopKTargets
    weights: Floats  # [student width, teacher size]
    real: NDArray[np.bool_]  # [student width]

    def projection(self) -> DeviceProjection:
        return device_projection(self.weights, self.real)

    def loss(self, divergence: Divergence, temperature: float = 1.0) -> LossOutput:
        return ctkd(
            self.logits,
            self.targets,
            self.projection(),
            divergence=divergence,
            temperature=temperature,
        )


def device_projection(weights: Floats, real: NDArray[np.bool_]) -> DeviceProjection:
    """A dense matrix in the form that losses read, without rounding to float32."""
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
    """Both sides have one vocabulary."""
    return device_projection(np.eye(size), np.ones(size, dtype=np.bool_))


def targets_of(
    teacher: Floats, kept: list[list[int]], slots: list[int] | None = None
) -> TopKTargets:
    """Rows of probabilities cut to the ids in ``kept``; short rows end in absent entries."""
    width = max((len(row) for row in kept), default=0)
    ids = torch.full((len(kept), width), -1)
    logprobs = torch.full((len(kept), width), -torch.inf, dtype=torch.float64)
    tails = torch.zeros(len(kept), dtype=torch.float64)
    for at, row in enumerate(kept):
        ids[at, : len(row)] = torch.tensor(row, dtype=torch.int64)
        logprobs[at, : len(row)] = torch.tensor(teacher[at, row]).log()
        tails[at] = torch.tensor(np.delete(teacher[at], row).sum()).log()
    slot_ids = torch.tensor(range(len(kept)) if slots is None else slots, dtype=torch.int64)
    return TopKTargets(slot_ids, ids, logprobs, tails)


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
    slots = sorted(draw.choice(tokens, places, replace=False).tolist())
    teacher = draw.dirichlet(np.full(teacher_size, draw.choice([0.05, 0.5, 5])), size=places)
    teacher = np.maximum(teacher, 1e-30)
    most = draw.integers(0, teacher_size + 1)
    kept = [
        draw.choice(teacher_size, draw.integers(0, most + 1), replace=False).tolist()
        for _ in range(places)
    ]
    targets = targets_of(teacher, kept, slots)
    shuffled = torch.tensor(draw.permutation(targets.ids.shape[1]), dtype=torch.int64)
    targets = TopKTargets(
        targets.slots,
        targets.ids[:, shuffled],
        targets.logprobs[:, shuffled],
        targets.tail_logprobs,
    )
    return Problem(torch.tensor(logits), targets, weights, real)


def reference_places(problem: Problem, *, forward: bool, temperature: float = 1.0) -> list[Place]:
    """Each place the slow way."""
    return [
        place(
            problem.logits[slot].tolist(),
            problem.real.tolist(),
            problem.weights.tolist(),
            {
                token: float(np.exp(logprob))
                for token, logprob in zip(ids, logprobs, strict=True)
                if token >= 0
            },
            float(np.exp(tail)),
            forward=forward,
            temperature=temperature,
        )
        for slot, ids, logprobs, tail in zip(
            problem.targets.slots.tolist(),
            problem.targets.ids.tolist(),
            problem.targets.logprobs.tolist(),
            problem.targets.tail_logprobs.tolist(),
            strict=True,
        )
    ]
