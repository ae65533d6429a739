"""``TeacherEvents``: which teacher ids are one event for a student with another tokenizer.

A vocabulary entry in common is not an event in common. Two rules make entries one event:

* A teacher token that no student token projects to is longer than what the student decides at once
  (`` January`` against `` Jan``). It belongs to the teacher id that its first student token
  projects to.
* At a position the tokens of both sides are the beginning of one text, also where the projection
  does not connect them: the teacher's token and the ids that the student's token projects to, or
  that token itself if it projects to none, are one event.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.projection.cache import DeviceProjection
from mopd_losses.projection.sides import TokenizerSide
from mopd_protocol.tokenizers.token_table import TokenTable

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TeacherEvents:
    """Teacher ids by event."""

    representatives: Ids  # [teacher size]; an id itself where the student cannot name its event
    row_starts: Ids  # [student width + 1]
    columns: Ids  # [entries], the teacher ids that each student id projects to

    @classmethod
    def of(
        cls, projection: DeviceProjection, first_tokens: Callable[[Sequence[int]], Ids]
    ) -> "TeacherEvents":
        """Build the events of a projection.

        Args:
            first_tokens: teacher ids -> the first student id of each one's text, or -1.
        """
        width = len(projection.real_ids)
        starts = projection.column_starts.cpu().numpy()
        students = projection.student_ids.cpu().numpy()
        columns = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        by_student = np.argsort(students, kind="stable")
        row_starts = np.searchsorted(students[by_student], np.arange(width + 1))
        # The last write of each student id is its heaviest column.
        by_weight = np.argsort(projection.log_weights.cpu().numpy(), kind="stable")
        heaviest = np.full(width + 1, -1, dtype=np.int64)
        heaviest[students[by_weight]] = columns[by_weight]
        representatives = np.arange(len(starts) - 1)
        unreachable = np.flatnonzero(np.diff(starts) == 0)
        if len(unreachable):
            named = heaviest[first_tokens(unreachable.tolist())]
            representatives[unreachable] = np.where(named >= 0, named, unreachable)
        return cls(representatives, row_starts, columns[by_student])

    def are_named(self, student_ids: Ids) -> NDArray[np.bool_]:
        """[rows], whether these tokens project to any teacher id: one that is a part of a character
        does not if the teacher has no tokens for bytes."""
        return self.row_starts[student_ids + 1] > self.row_starts[student_ids]

    def realised(self, student_ids: Ids, teacher_ids: Ids) -> Ids:
        """[rows, members], the ids of each row's realised event; -1 where missing.

        Args:
            student_ids: [rows], the student's tokens.
            teacher_ids: [rows], the teacher's.
        """
        counts = self.row_starts[student_ids + 1] - self.row_starts[student_ids]
        places = np.arange(int(counts.max(initial=0)))
        at = self.row_starts[student_ids][:, None] + places
        present = places < counts[:, None]
        columns = np.where(present, self.columns[np.where(present, at, 0)], -1)
        members = np.column_stack([self.representatives[teacher_ids], columns])
        # An id once a row.
        ordered = np.sort(members, axis=1)
        ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]] = -1
        return ordered


def first_student_tokens(
    teacher: TokenTable, student: TokenizerSide
) -> Callable[[Sequence[int]], Ids]:
    """Return a function: teacher ids -> the first token of each one's text, for a student."""

    def tokens(teacher_ids: Sequence[int]) -> Ids:
        results = np.full(len(teacher_ids), -1, dtype=np.int64)
        texts: dict[int, str] = {}
        for number, token in enumerate(teacher_ids):
            try:
                texts[number] = teacher.bytes_of(token).decode()
            except UnicodeDecodeError:  # half a character
                continue
        for number, ids in zip(
            texts, student.encoder.encode_batch(list(texts.values())), strict=True
        ):
            results[number] = ids[0] if ids else -1
        return results

    return tokens
