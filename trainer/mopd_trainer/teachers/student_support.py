"""The student's top-k as the ids that a teacher scores.

Ids that are likely under the student and unlikely under the teacher are in the tail of the
teacher's top-k. A reverse divergence is an expectation under the student, so it uses the student's
ids.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.text_offsets import align_text
from mopd_losses.projection.matrix import ProjectionMatrix
from mopd_protocol.errors import DataError, TeacherError
from mopd_protocol.samples import Rollout
from mopd_protocol.teacher_input import TeacherInput
from mopd_trainer.teachers.connect import Teacher


class Counterparts:
    """Student id -> the teacher ids of its projection, largest weight first."""

    def __init__(self, projection: ProjectionMatrix) -> None:
        columns = np.repeat(np.arange(projection.teacher_size), np.diff(projection.column_starts))
        order = np.lexsort((columns, -projection.weights, projection.student_ids))
        self._teacher_ids = columns[order]
        counts = np.bincount(projection.student_ids, minlength=projection.student_width)
        self._starts = np.concatenate([[0], np.cumsum(counts)])

    def of(self, student_id: int) -> NDArray[np.int64]:
        """Return the teacher ids, largest weight first; empty without a projection."""
        return self._teacher_ids[self._starts[student_id] : self._starts[student_id + 1]]


def with_student_support(
    teacher_input: TeacherInput, rollout: Rollout, teacher: Teacher, counterparts: Counterparts
) -> TeacherInput:
    """Add the student's ids as candidates to a request.

    A teacher that receives token ids scores the student's ids at every token. Other teachers score,
    at the start of each aligned span, the teacher ids of the student's ids; rows inside a span
    stay empty, because the student's prefix differs.

    Raises:
        DataError: when the rollout lacks the student's ids.
    """
    top_k = teacher.config.top_k
    student_ids = rollout.student_topk_ids
    if student_ids is None or student_ids.shape[1] == 0:
        raise DataError(
            f"teacher {teacher.name!r}: support 'student_topk' needs the student's most likely ids "
            f"(found none in the rollout of prompt {rollout.prompt.index})"
        )
    if teacher.config.sends_token_ids:
        of = teacher.controls.teacher_ids
        rows = [
            _first_distinct((t for s in _present(row) for t in of(s)), top_k)
            for row in student_ids[:, :top_k]
        ]
    else:
        rows = _projected_rows(teacher_input, student_ids[:, :top_k], teacher, counterparts)
    request = teacher_input.request.model_copy(update={"candidate_ids": rows})
    return replace(teacher_input, request=request)


def _projected_rows(
    teacher_input: TeacherInput,
    student_ids: NDArray[np.int32],
    teacher: Teacher,
    counterparts: Counterparts,
) -> list[list[int]]:
    """Return one row per token of the teacher's tokenization."""
    try:
        completion = teacher.tokenizer.completion(teacher_input.request)
    except TeacherError:
        return []  # the teacher rejects the request with the same reason
    alignment = align_text(teacher_input.completion, completion, teacher.tokenizer.encoder)
    rows: list[list[int]] = [[] for _ in range(len(completion))]
    own_ends, ends = teacher.controls.student_ends, teacher.controls.teacher_ends
    for student_row, teacher_row in zip(
        alignment.student_starts.tolist(), alignment.teacher_starts.tolist(), strict=True
    ):
        ids = (
            t
            for s in _present(student_ids[student_row])
            for t in (ends if s in own_ends else counterparts.of(s).tolist())
        )
        rows[teacher_row] = _first_distinct(ids, teacher.config.top_k)
    return rows


def _present(row: NDArray[np.int32]) -> list[int]:
    return row[row >= 0].tolist()


def _first_distinct(ids: Iterable[int], count: int) -> list[int]:
    return list(islice(dict.fromkeys(ids), count))
