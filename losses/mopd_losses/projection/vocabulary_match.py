"""``VocabularyMatch``: which student id is which teacher id, one to one."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64
from numpy.typing import NDArray
from torch import Tensor

from mopd_losses.projection.matrix import ProjectionMatrix
from mopd_protocol.tokenizers.token_table import TokenTable


@dataclass(frozen=True, eq=False)
class VocabularyMatch:
    """Pairs of ids that two vocabularies have in common; no id is in two pairs."""

    student_of: Int64[Tensor, "teacher_size"]  # the student's id of a teacher id, or -1
    unmatched: Bool[Tensor, "student_width"]  # real student ids that are in no pair

    def to(self, device: torch.device | str) -> "VocabularyMatch":
        """The same on a device."""
        return VocabularyMatch(self.student_of.to(device), self.unmatched.to(device))

    @property
    def teacher_size(self) -> int:
        """Teacher ids."""
        return len(self.student_of)

    @property
    def pairs(self) -> int:
        """Ids in common."""
        return int((self.student_of >= 0).sum())

    @property
    def coverage(self) -> float:
        """The share of the teacher's ids that are in common; 0 of an empty vocabulary."""
        return self.pairs / max(self.teacher_size, 1)


def exact_match(
    projection: ProjectionMatrix, student: TokenTable, teacher: TokenTable
) -> VocabularyMatch:
    """Ids that spell the same bytes, and control tokens of the same role or name.

    Of several student ids for one teacher id the one that ends a turn is taken, then the smallest.

    Args:
        projection: between these two, by any settings; it selects one of several teacher ids with
            the same bytes.
    """
    columns, rows, _ = _entries(projection)
    pairs = zip(columns.tolist(), rows.tolist(), strict=True)
    same = np.array(
        [student.all_bytes[v] == teacher.all_bytes[j] for j, v in pairs], dtype=np.bool_
    )
    columns, rows = columns[same], rows[same]
    return _best(projection, columns, rows, np.where(rows == student.roles.end_of_turn, 1.0, 0.0))


def weighted_match(projection: ProjectionMatrix, least_weight: float = 0.6) -> VocabularyMatch:
    """Student ids with their heaviest teacher id, where that weighs enough (X-Token's relaxed set).

    Per teacher id the largest weight wins, then the smallest student id. Meant for projections with
    ``weights: decay``: where all weight is on the first piece, a token without a counterpart weighs
    as much as the one that is its counterpart.
    """
    columns, rows, weights = _entries(projection)
    order = np.lexsort((columns, -weights, rows))  # of each row the heaviest first
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = rows[order][1:] != rows[order][:-1]
    heaviest = order[first & (weights[order] >= np.float32(least_weight))]
    return _best(projection, columns[heaviest], rows[heaviest], weights[heaviest])


def _entries(
    projection: ProjectionMatrix,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Teacher id, student id and weight of every entry."""
    columns = np.repeat(np.arange(projection.teacher_size), np.diff(projection.column_starts))
    return columns, projection.student_ids.astype(np.int64), projection.weights


def _best(
    projection: ProjectionMatrix,
    columns: NDArray[np.int64],
    rows: NDArray[np.int64],
    scores: NDArray[np.floating],
) -> VocabularyMatch:
    """Select for each teacher id the candidate with the highest score, then the smallest id."""
    student_of = np.full(projection.teacher_size, -1, dtype=np.int64)
    worst_first = np.lexsort((-rows, scores))
    student_of[columns[worst_first]] = rows[worst_first]  # the last written is the best
    unmatched = projection.real_ids.copy()
    unmatched[student_of[student_of >= 0]] = False
    return VocabularyMatch(torch.tensor(student_of), torch.tensor(unmatched))
