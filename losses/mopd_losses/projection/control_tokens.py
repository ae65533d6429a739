"""``ControlTokens``: which control token of a student is which of a teacher."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mopd_protocol.tokenizers.token_table import TokenTable


@dataclass(frozen=True)
class ControlTokens:
    """Control tokens in pairs: those that end a completion by their role, others by name.

    A token that ends completions on one side only is not the token of its name on the other. The
    ordinary tokens that this leaves on both sides are pairs: where a student ends with
    ``<|endoftext|>`` and a teacher with ``<|im_end|>``, the student's ``<|im_end|>`` is the
    teacher's ``<|endoftext|>``. One that only the teacher has left is no ordinary token of the
    student, and counts as an end.
    """

    student_ends: tuple[int, ...]  # the first one represents them
    teacher_ends: tuple[int, ...]  # the first one is what a finished completion ends with
    ordinary: Mapping[int, int]  # student id -> teacher id

    @classmethod
    def of(cls, student: TokenTable, teacher: TokenTable) -> "ControlTokens":
        """Pair the control tokens of two tokenizers."""
        own, other = student.roles.ending, teacher.roles.ending
        ordinary: dict[int, int] = {}
        left: list[int] = []
        for name, student_id in student.controls.items():
            if student_id in own or name not in teacher.controls:
                continue
            if teacher.controls[name] in other:
                left.append(student_id)
            else:
                ordinary[student_id] = teacher.controls[name]
        names = {name for name, student_id in student.controls.items() if student_id in own}
        others = sorted(
            teacher_id
            for name, teacher_id in teacher.controls.items()
            if name in names and teacher_id not in other
        )
        ordinary |= zip(sorted(left), others, strict=False)
        ends = (*other, *others[len(left) :]) if other else ()
        return cls(own, ends, ordinary)

    def teacher_ids(self, student_id: int) -> tuple[int, ...]:
        """Return the ids of a teacher with the student's vocabulary that are a student's id."""
        if student_id in self.student_ends:
            return self.teacher_ends
        if student_id in self.ordinary:
            return (self.ordinary[student_id],)
        return () if student_id in self.teacher_ends else (student_id,)

    def sent(self, student_ids: Iterable[int]) -> list[int]:
        """Return the ids of a completion that a teacher with the student's vocabulary receives.

        The student's token that only the teacher ends with is sent as it is.
        """
        return [self.ordinary.get(student_id, student_id) for student_id in student_ids]
