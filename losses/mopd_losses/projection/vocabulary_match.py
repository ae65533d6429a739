"""``VocabularyMatch``: which student id is which teacher id, one to one."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64
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


def exact_match(
    projection: ProjectionMatrix, student: TokenTable, teacher: TokenTable
) -> VocabularyMatch:
    """Ids that spell the same bytes, and control tokens of the same role or name.

    Of several student ids for one teacher id the one that ends a turn is taken, then the smallest.

    Args:
        projection: between these two, by any settings; it selects one of several teacher ids with
            the same bytes.
    """
    columns = np.repeat(np.arange(projection.teacher_size), np.diff(projection.column_starts))
    rows = projection.student_ids.astype(np.int64)
    pairs = zip(columns.tolist(), rows.tolist(), strict=True)
    same = np.array(
        [student.all_bytes[v] == teacher.all_bytes[j] for j, v in pairs], dtype=np.bool_
    )
    columns, rows = columns[same], rows[same]
    student_of = np.full(projection.teacher_size, -1, dtype=np.int64)
    worst_first = np.lexsort((-rows, rows == student.roles.end_of_turn))
    student_of[columns[worst_first]] = rows[worst_first]  # the last written is the best
    unmatched = projection.real_ids.copy()
    unmatched[student_of[student_of >= 0]] = False
    return VocabularyMatch(torch.tensor(student_of), torch.tensor(unmatched))
