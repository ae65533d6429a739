"""Facts about the projection of a student's vocabulary to a teacher's."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mopd_losses.config import ProjectionSettings
from mopd_losses.projection.matrix import ProjectionMatrix, build_projection
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.inspection.tokenizers import NamedTokenizer, readable


def project(
    student: NamedTokenizer, teacher: NamedTokenizer, settings: ProjectionSettings
) -> ProjectionMatrix:
    """Build the projection of two tokenizers."""
    return build_projection(
        student.table,
        teacher.table,
        teacher.encoder,
        student_width=student.logit_width,
        settings=settings,
    )


def projection_facts(matrix: ProjectionMatrix) -> dict[str, Any]:
    """Return numbers of ids, fingerprints, settings and ids without a counterpart."""
    per_row = np.bincount(matrix.student_ids, minlength=matrix.student_width)
    per_column = np.diff(matrix.column_starts)
    most = int(per_column.argmax()) if len(per_column) else 0
    return {
        "student_fingerprint": matrix.student_fingerprint,
        "teacher_fingerprint": matrix.teacher_fingerprint,
        "settings": matrix.settings.model_dump(),
        "student_ids": int(matrix.real_ids.sum()),
        "projected": int((per_row > 0).sum()),
        "one_hot": int((per_row == 1).sum()),
        "spread": int((per_row > 1).sum()),
        "unprojected": len(matrix.unprojected_ids),
        "teacher_ids": matrix.teacher_size,
        "reached": int((per_column > 0).sum()),
        "unsupported": len(matrix.unsupported_ids),
        "fed_by_several": int((per_column > 1).sum()),
        "most_fed_id": most if len(per_column) and per_column[most] else None,
        "most_fed_by": int(per_column[most]) if len(per_column) else 0,
        "entries": len(matrix.student_ids),
        "unprojected_ids": matrix.unprojected_ids.tolist(),
        "unsupported_ids": matrix.unsupported_ids.tolist(),
    }


def token_facts(
    matrix: ProjectionMatrix, student: TokenTable, teacher: TokenTable, *, rows: int
) -> dict[str, Any]:
    """Return facts that need both tokenizers: bytes, control tokens, roles and the worst rows.

    The worst rows are student tokens whose first teacher token covers the smallest share of their
    bytes.

    Args:
        rows: maximum length of each list.
    """
    student_name, teacher_name = _namer(student), _namer(teacher)
    student_bytes, teacher_bytes = student.all_bytes, teacher.all_bytes
    columns = np.repeat(np.arange(matrix.teacher_size), np.diff(matrix.column_starts))
    order = np.lexsort((-matrix.weights, matrix.student_ids))
    students, targets, weights = matrix.student_ids[order], columns[order], matrix.weights[order]
    starts = np.flatnonzero(np.diff(students, prepend=-1))
    first = dict(zip(students[starts].tolist(), targets[starts].tolist(), strict=True))
    shares = {
        token: len(teacher_bytes[target]) / len(student_bytes[token])
        for token, target in first.items()
        if student_bytes[token] and student_bytes[token] != teacher_bytes[target]
    }
    worst = sorted(shares, key=lambda token: (shares[token], -len(student_bytes[token]), token))
    unsupported = matrix.unsupported_ids.tolist()
    controls = [teacher_name(token) for token in unsupported if token in teacher.marks]
    teacher_roles = teacher.roles.single

    def row(token: int) -> dict[str, Any]:
        entries = range(*np.searchsorted(students, [token, token + 1]).tolist())
        return {
            "student_id": token,
            "bytes": readable(student_bytes[token]),
            "targets": [
                (int(targets[i]), teacher_name(int(targets[i])), float(weights[i])) for i in entries
            ],
            "first_share": shares[token],
        }

    return {
        "text_ids": int((student.byte_lengths > 0).sum()),
        "same_bytes": sum(
            student_bytes[token] == teacher_bytes[target]
            for token, target in first.items()
            if student_bytes[token]
        ),
        "controls": len(student.marks),
        "controls_projected": sum(token in first for token in student.marks),
        "unprojected": [student_name(t) for t in matrix.unprojected_ids[:rows].tolist()],
        "most_fed": teacher_name(int(np.diff(matrix.column_starts).argmax())),
        "unsupported_text": sum(bool(teacher_bytes[token]) for token in unsupported),
        "unsupported_controls": controls[:rows],
        "roles": [
            {
                "role": role.replace("_", " "),
                "student": student_name(token),
                "teacher": teacher_name(teacher_roles[role]),
                "target": teacher_name(first[token]) if token in first else None,
            }
            for role, token in student.roles.single.items()
            if token is not None or teacher_roles[role] is not None
        ],
        "worst": [row(token) for token in worst[:rows]],
    }


def _namer(table: TokenTable) -> Callable[[int | None], str | None]:
    """Return a function: token id -> literal text of a control token, or bytes of a text token."""
    literal = {token: name for name, token in table.controls.items()}

    def name(token: int | None) -> str | None:
        if token is None:
            return None
        if token in table.marks:
            return literal.get(token, table.marks[token])
        return readable(table.bytes_of(token)) or f"(no token {token})"

    return name
