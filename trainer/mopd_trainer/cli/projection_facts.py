"""What there is to know about a projection: how much it covers, and which rows are poor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mopd_losses.projection.matrix import ProjectionMatrix
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.cli.readable_bytes import readable


@dataclass(frozen=True)
class Counts:
    """Numbers of ids, out of the matrix alone."""

    student_ids: int  # that have a token
    projected: int
    one_hot: int
    spread: int
    unprojected: int
    teacher_ids: int
    reached: int
    unsupported: int
    fed_by_several: int  # teacher ids
    most_fed_id: int | None
    most_fed_by: int
    entries: int


@dataclass(frozen=True)
class Row:
    """One student token and where its probability goes, bytes readable."""

    student_id: int
    spells: str
    targets: tuple[tuple[int, str, float], ...]  # teacher id, what it spells, weight
    first_share: float  # of the token's bytes, in the target of the greatest weight


@dataclass(frozen=True)
class Role:
    """A part that tokens play, and who plays it; ``None`` for nobody."""

    role: str
    student: str | None
    teacher: str | None
    target: str | None  # where the student's token is projected to


@dataclass(frozen=True)
class Spelled:
    """What the two tokenizers add to the numbers."""

    text_ids: int  # student ids that spell bytes
    same_bytes: int  # of these, those whose exact bytes are a teacher token
    controls: int  # student control tokens
    controls_projected: int
    unprojected: tuple[str, ...]  # names, or bytes, of the first
    most_fed: str  # what the teacher id that most student ids go to spells
    unsupported_text: int
    unsupported_controls: tuple[str, ...]
    roles: tuple[Role, ...]
    worst: tuple[Row, ...]


def counts_of(matrix: ProjectionMatrix) -> Counts:
    """Counts of a matrix, of whichever tokenizers."""
    per_row = np.bincount(matrix.student_ids, minlength=matrix.student_width)
    per_column = np.diff(matrix.column_starts)
    most = int(per_column.argmax()) if len(per_column) else 0
    return Counts(
        student_ids=int(matrix.real_ids.sum()),
        projected=int((per_row > 0).sum()),
        one_hot=int((per_row == 1).sum()),
        spread=int((per_row > 1).sum()),
        unprojected=len(matrix.unprojected_ids),
        teacher_ids=matrix.teacher_size,
        reached=int((per_column > 0).sum()),
        unsupported=len(matrix.unsupported_ids),
        fed_by_several=int((per_column > 1).sum()),
        most_fed_id=most if len(per_column) and per_column[most] else None,
        most_fed_by=int(per_column[most]) if len(per_column) else 0,
        entries=len(matrix.student_ids),
    )


def spelled_of(
    matrix: ProjectionMatrix, student: TokenTable, teacher: TokenTable, *, rows: int
) -> Spelled:
    """The matrix seen through its two tokenizers; of every list the first or worst ``rows``."""
    my_name, their_name = _namer(student), _namer(teacher)
    columns = np.repeat(np.arange(matrix.teacher_size), np.diff(matrix.column_starts))
    mine, theirs = student.all_bytes, teacher.all_bytes
    order = np.lexsort((-matrix.weights, matrix.student_ids))
    students, targets, weights = matrix.student_ids[order], columns[order], matrix.weights[order]
    starts = np.flatnonzero(np.diff(students, prepend=-1))
    first = dict(zip(students[starts].tolist(), targets[starts].tolist(), strict=True))
    shares = _first_shares(first, mine, theirs)
    worst = sorted(shares, key=lambda token: (shares[token], -len(mine[token]), token))[:rows]
    unsupported = matrix.unsupported_ids.tolist()
    return Spelled(
        text_ids=int((student.byte_lengths > 0).sum()),
        same_bytes=sum(
            mine[token] == theirs[target] for token, target in first.items() if mine[token]
        ),
        controls=len(student.marks),
        controls_projected=sum(token in first for token in student.marks),
        unprojected=tuple(map(my_name, matrix.unprojected_ids[:rows].tolist())),
        most_fed=their_name(int(np.diff(matrix.column_starts).argmax())),
        unsupported_text=sum(bool(theirs[token]) for token in unsupported),
        unsupported_controls=tuple(
            their_name(token) for token in unsupported if token in teacher.marks
        )[:rows],
        roles=_roles(student, teacher, first),
        worst=tuple(
            Row(
                student_id=token,
                spells=readable(mine[token]),
                targets=tuple(
                    (int(targets[at]), their_name(int(targets[at])), float(weights[at]))
                    for at in range(*np.searchsorted(students, [token, token + 1]).tolist())
                ),
                first_share=shares[token],
            )
            for token in worst
        ),
    )


def _first_shares(
    first: dict[int, int], mine: Sequence[bytes], theirs: Sequence[bytes]
) -> dict[int, float]:
    """Text tokens whose bytes the teacher does not have: share of them in the first target."""
    return {
        token: len(theirs[target]) / len(mine[token])
        for token, target in first.items()
        if mine[token] and mine[token] != theirs[target]
    }


def _roles(student: TokenTable, teacher: TokenTable, first: dict[int, int]) -> tuple[Role, ...]:
    mine, theirs = student.roles.model_dump(), teacher.roles.model_dump()
    my_name, their_name = _namer(student), _namer(teacher)

    def named(name: Callable[[int], str], token: int | None) -> str | None:
        return None if token is None else name(token)

    return tuple(
        Role(
            role=role.replace("_", " "),
            student=named(my_name, mine[role]),
            teacher=named(their_name, theirs[role]),
            target=named(their_name, first.get(-1 if mine[role] is None else mine[role])),
        )
        for role in mine
        if mine[role] is not None or theirs[role] is not None
    )


def _namer(table: TokenTable) -> Callable[[int], str]:
    """Token id -> a control token's literal text, or a text token's bytes."""
    literal = {token: name for name, token in table.controls.items()}

    def name(token: int) -> str:
        if token in table.marks:
            return literal.get(token, table.marks[token])
        return readable(table.bytes_of(token)) or f"(no token {token})"

    return name
