"""The projection as a dense matrix, filled row by row from its definition."""

from mopd_losses.config import ProjectionSettings
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable

Dense = list[list[float]]


def dense_projection(
    student: TokenTable,
    teacher: TokenTable,
    encoder: TextEncoder,
    *,
    student_width: int,
    settings: ProjectionSettings,
) -> Dense:
    """``[student_width][teacher.size]``."""
    matrix = [[0.0] * teacher.size for _ in range(student_width)]
    for token_id in range(student.size):
        if not student.present[token_id]:
            continue
        if token_id in student.marks:
            match = _control(token_id, student, teacher)
            if match is not None:
                matrix[token_id][match] = 1.0
            continue
        spelled = student.bytes_of(token_id)
        if not spelled:
            continue
        if student.fingerprint == teacher.fingerprint:  # two ids may have the same bytes
            matrix[token_id][token_id] = 1.0
            continue
        whole = _spelled_exactly(spelled, teacher, encoder)
        pieces = [whole] if whole is not None else _pieces(spelled, teacher, encoder)
        for piece, weight in zip(pieces, _weights(len(pieces), settings), strict=False):
            matrix[token_id][piece] += weight
    return matrix


def _weights(pieces: int, settings: ProjectionSettings) -> list[float]:
    if settings.weights == "first":
        return [1.0] + [0.0] * (pieces - 1)
    raw = [0.9 * settings.decay**rank for rank in range(min(pieces, settings.max_length))]
    return [weight / sum(raw) for weight in raw]


def _control(token_id: int, student: TokenTable, teacher: TokenTable) -> int | None:
    if student.marks[token_id] == END_OF_TURN:
        turn, text = teacher.roles.end_of_turn, teacher.roles.eos
        if token_id == student.roles.eos != student.roles.end_of_turn is not None:
            return turn if text is None else text
        return text if turn is None else turn
    name = next(name for name, control_id in student.controls.items() if control_id == token_id)
    match = teacher.controls.get(name)
    if match not in teacher.roles.ending:
        return match
    # The n-th ordinary token that the teacher ends with is the n-th one that the student ends with.
    of_student = [
        v
        for other, v in student.controls.items()
        if teacher.controls.get(other) in teacher.roles.ending and v not in student.roles.ending
    ]
    of_teacher = [
        j
        for other, j in teacher.controls.items()
        if student.controls.get(other) in student.roles.ending and j not in teacher.roles.ending
    ]
    return dict(zip(sorted(of_student), sorted(of_teacher), strict=False)).get(token_id)


def _spelled_exactly(spelled: bytes, teacher: TokenTable, encoder: TextEncoder) -> int | None:
    candidates = [
        teacher_id for teacher_id in range(teacher.size) if teacher.bytes_of(teacher_id) == spelled
    ]
    if len(candidates) > 1:
        text = _text(spelled)
        emitted = encoder.encode(text) if text is not None else []
        if len(emitted) == 1 and emitted[0] in candidates:
            return emitted[0]
    return min(candidates, default=None)


def _pieces(spelled: bytes, teacher: TokenTable, encoder: TextEncoder) -> list[int]:
    text = _text(spelled)
    if text is not None:
        emitted = encoder.encode(text)
        if b"".join(teacher.bytes_of(piece) for piece in emitted) == spelled:
            return emitted
    pieces: list[int] = []
    while spelled:
        for length in range(len(spelled), 0, -1):
            piece_id = _spelled_exactly(spelled[:length], teacher, encoder)
            if piece_id is not None:
                pieces.append(piece_id)
                spelled = spelled[length:]
                break
        else:
            return []
    return pieces


def _text(spelled: bytes) -> str | None:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return None
