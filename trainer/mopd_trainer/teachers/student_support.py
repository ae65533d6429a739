"""The student's own top-k, as the ids that a teacher is asked to score.

A teacher's top-k does not show where the student errs: what the student believes in and the
teacher does not is in the tail. A reverse divergence is a mean under the student, so it is compared
on the student's ids.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from mopd_client.tokenizers.sequence_tokens import completion_tokens
from mopd_losses.alignment.byte_alignment import align
from mopd_losses.projection.matrix import ProjectionMatrix
from mopd_protocol.errors import DataError, TeacherError
from mopd_protocol.samples import Rollout
from mopd_trainer.data.teacher_input import TeacherInput
from mopd_trainer.teachers.connect import Teacher


class Counterparts:
    """Student id -> the teacher ids that it is projected on, the largest weight first."""

    def __init__(self, projection: ProjectionMatrix) -> None:
        columns = np.repeat(np.arange(projection.teacher_size), np.diff(projection.column_starts))
        order = np.lexsort((columns, -projection.weights, projection.student_ids))
        self._teacher_ids = columns[order]
        counts = np.bincount(projection.student_ids, minlength=projection.student_width)
        self._starts = np.concatenate([[0], np.cumsum(counts)])

    def of(self, student_id: int) -> NDArray[np.int64]:
        """The one with the largest weight first; none where the id reaches no teacher id."""
        return self._teacher_ids[self._starts[student_id] : self._starts[student_id + 1]]


def with_student_support(
    view: TeacherInput, rollout: Rollout, teacher: Teacher, counterparts: Counterparts
) -> TeacherInput:
    """The view, asking about the student's ids at the rows that are compared.

    Sent the student's own ids, a teacher is asked about the student's at every token. Otherwise it
    is asked where an aligned span begins, about the counterparts of the student's ids there, and
    about nothing inside a span, where the student has read something else.

    Raises:
        DataError: when the rollout does not have the student's ids.
    """
    top_k = teacher.config.top_k
    own = rollout.student_topk_ids
    if own is None or own.shape[1] == 0:
        raise DataError(
            f"teacher {teacher.name!r} is to be asked about the student's most likely ids, but the "
            f"rollout of prompt {rollout.prompt.index} was made without"
        )
    if teacher.config.sends_token_ids:
        rows = [_present(row)[:top_k] for row in own]
    else:
        rows = _projected_rows(view, own, teacher, counterparts)
    request = view.request.model_copy(update={"candidate_ids": rows})
    return replace(view, request=request)


def _projected_rows(
    view: TeacherInput, own: NDArray[np.int32], teacher: Teacher, counterparts: Counterparts
) -> list[list[int]]:
    """One row a token of the teacher's tokenization, which is the one that it will make."""
    try:
        completion = completion_tokens(teacher.name, teacher.tokenizer, view.request)
    except TeacherError:
        return []  # the teacher refuses it too, and says why
    alignment = align(view.completion, completion)
    rows: list[list[int]] = [[] for _ in range(len(completion))]
    for student_row, teacher_row in zip(
        alignment.student_starts.tolist(), alignment.teacher_starts.tolist(), strict=True
    ):
        found = (int(t) for s in _present(own[student_row]) for t in counterparts.of(s))
        rows[teacher_row] = _first_distinct(found, teacher.config.top_k)
    return rows


def _present(row: NDArray[np.int32]) -> list[int]:
    return row[row >= 0].tolist()


def _first_distinct(ids: Iterable[int], count: int) -> list[int]:
    return list(islice(dict.fromkeys(ids), count))
