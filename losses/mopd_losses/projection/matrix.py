"""``ProjectionMatrix``: how each student token's probability spreads over a teacher's vocabulary.

A row contains a student id's weights on teacher ids and sums to one, or is empty: a student token
whose exact bytes the teacher has goes to that id; any other goes to the pieces that the teacher
spells it with; a control token goes to the one that ``control_tokens`` pairs it with.
Stored by columns (CSC), because losses look up which student ids feed the teacher ids of a top-k.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from mopd_losses.config import ProjectionSettings
from mopd_losses.projection.control_tokens import ControlTokens
from mopd_losses.projection.segmentation import Segmentation, as_text
from mopd_protocol.arrays import FloatArray, IntArray, frozen_array
from mopd_protocol.errors import DataError
from mopd_protocol.runtime.atomic_file import replacing
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable

#: Raised when the same two tokenizers and settings would give another matrix than before.
BUILDER_VERSION = 1


@dataclass(frozen=True, eq=False)
class ProjectionMatrix:
    """Sparse ``[student logit width, teacher vocabulary]``, by columns.

    Column ``j`` contains ``student_ids[column_starts[j]:column_starts[j + 1]]`` and their weights.

    Raises:
        DataError: when the arrays contradict each other or a row's weights do not sum to one.
    """

    student_fingerprint: str
    teacher_fingerprint: str
    student_width: int  # rows: the student's logit width, padding rows (always empty) included
    teacher_size: int  # columns
    settings: ProjectionSettings
    column_starts: NDArray[np.int64]  # [teacher_size + 1]
    student_ids: IntArray  # [entries]
    weights: FloatArray  # [entries]
    real_ids: NDArray[np.bool_]  # [student_width], False for padding rows of the student's head

    def __post_init__(self) -> None:
        for name, dtype in (
            ("column_starts", "int64"),
            ("student_ids", "int32"),
            ("weights", "float32"),
            ("real_ids", "bool"),
        ):
            object.__setattr__(self, name, frozen_array(getattr(self, name), dtype))
        entries = len(self.student_ids)
        if (
            len(self.column_starts) != self.teacher_size + 1
            or int(self.column_starts[0]) != 0
            or int(self.column_starts[-1]) != entries
            or (np.diff(self.column_starts) < 0).any()
            or len(self.weights) != entries
            or self.real_ids.shape != (self.student_width,)
        ):
            raise DataError(
                f"projection of {self.teacher_size} columns, {entries} student ids, "
                f"{len(self.weights)} weights, {len(self.column_starts)} column starts and "
                f"{len(self.real_ids)} real ids: the arrays contradict each other"
            )
        if entries and (self.student_ids.min() < 0 or self.student_ids.max() >= self.student_width):
            raise DataError(
                f"projection names student id {self.student_ids.max()}, outside a head of "
                f"{self.student_width} rows"
            )
        sums = self.row_sums
        if not (np.isclose(sums, 1, atol=1e-5) | (sums == 0)).all() or (self.weights <= 0).any():
            raise DataError("rows of a projection must sum to one, with weights above zero")

    @property
    def row_sums(self) -> NDArray[np.float64]:
        """[student_width], one where the row is projected and zero where it is empty."""
        sums = np.bincount(self.student_ids, weights=self.weights, minlength=self.student_width)
        return sums.astype(np.float64)

    @property
    def unprojected_ids(self) -> NDArray[np.int64]:
        """Student ids that the student can emit but that reach no teacher id."""
        return np.flatnonzero((self.row_sums == 0) & self.real_ids)

    @property
    def unsupported_ids(self) -> NDArray[np.int64]:
        """Teacher ids that no student id reaches; a teacher's mass on them goes to the tail."""
        return np.flatnonzero(np.diff(self.column_starts) == 0)

    @cached_property
    def key(self) -> str:
        """32 hex digits that name the matrix by its content."""
        digest = hashlib.sha256()
        for part in (self.column_starts, self.student_ids, self.weights, self.real_ids):
            digest.update(np.ascontiguousarray(part).tobytes())
        digest.update(f"{self.student_fingerprint}{self.teacher_fingerprint}".encode())
        return digest.hexdigest()[:32]

    def require(self, student_fingerprint: str, teacher_fingerprint: str) -> None:
        """Raises DataError unless the matrix was built for these two tokenizers."""
        for side, built, fingerprint in (
            ("student", self.student_fingerprint, student_fingerprint),
            ("teacher", self.teacher_fingerprint, teacher_fingerprint),
        ):
            if built != fingerprint:
                raise DataError(
                    f"projection was built for {side} tokenizer {built[:12]}, but this {side} has "
                    f"{fingerprint[:12]}; build a projection for this pair"
                )

    def dense(self) -> NDArray[np.float64]:
        """``[student_width, teacher_size]``, for small vocabularies and for looking at."""
        matrix = np.zeros((self.student_width, self.teacher_size))
        columns = np.repeat(np.arange(self.teacher_size), np.diff(self.column_starts))
        matrix[self.student_ids, columns] = self.weights
        return matrix

    def save(self, path: Path) -> None:
        """Writes one safetensors file with both fingerprints in its metadata, atomically.

        Raises:
            DataError: when the folder is not writable.
        """
        metadata = {
            "builder_version": str(BUILDER_VERSION),
            "student_fingerprint": self.student_fingerprint,
            "teacher_fingerprint": self.teacher_fingerprint,
            "student_width": str(self.student_width),
            "teacher_size": str(self.teacher_size),
            "settings": self.settings.model_dump_json(),
        }
        tensors = {
            "column_starts": self.column_starts,
            "student_ids": self.student_ids,
            "weights": self.weights,
            "real_ids": self.real_ids,
        }
        try:
            with replacing(path) as temporary:  # ``save_file`` would write another such file
                temporary.write_bytes(save(tensors, metadata=metadata))
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise DataError(
                f"projection {path} cannot be written: {reason}; name a folder that takes files"
            ) from error

    @classmethod
    def load(cls, path: Path) -> "ProjectionMatrix":
        """Reads what ``save`` wrote.

        Raises:
            DataError: when the file is not a projection, or from another builder version.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                metadata: dict[str, str] = file.metadata() or {}
                if metadata["builder_version"] != str(BUILDER_VERSION):
                    raise DataError(
                        f"written by projection builder {metadata['builder_version']}, this is "
                        f"{BUILDER_VERSION}; build it again"
                    )
                return cls(
                    student_fingerprint=metadata["student_fingerprint"],
                    teacher_fingerprint=metadata["teacher_fingerprint"],
                    student_width=int(metadata["student_width"]),
                    teacher_size=int(metadata["teacher_size"]),
                    settings=ProjectionSettings.model_validate_json(metadata["settings"]),
                    column_starts=file.get_tensor("column_starts"),
                    student_ids=file.get_tensor("student_ids"),
                    weights=file.get_tensor("weights"),
                    real_ids=file.get_tensor("real_ids"),
                )
        except (OSError, SafetensorError, KeyError) as error:
            raise DataError(f"{path} is not a projection file: {error}") from error
        except ValueError as error:  # numbers, settings or arrays that make no sense
            raise DataError(f"{path} is not a sound projection file: {error}") from error


def build_projection(
    student: TokenTable,
    teacher: TokenTable,
    teacher_encoder: TextEncoder,
    *,
    student_width: int,
    settings: ProjectionSettings | None = None,
) -> ProjectionMatrix:
    """The projection from one vocabulary to another, from bytes only.

    Args:
        student_width: rows of the student's language-model head, padding included.

    Raises:
        DataError: when the head is narrower than the student's tokenizer.
    """
    settings = settings or ProjectionSettings()
    real_ids = student.real_ids(student_width)
    rows = dict(_control_rows(student, teacher))
    rows.update(_text_rows(student, teacher, teacher_encoder, settings))
    return _from_rows(rows, student, teacher, real_ids, settings)


def identity_projection(table: TokenTable, *, logit_width: int) -> ProjectionMatrix:
    """The identity on one vocabulary: what makes same-vocabulary losses a special case."""
    real_ids = table.real_ids(logit_width)
    rows = {int(token_id): {int(token_id): 1.0} for token_id in np.flatnonzero(real_ids)}
    return _from_rows(rows, table, table, real_ids, ProjectionSettings())


Row = Mapping[int, float]  # teacher id -> weight


def _control_rows(student: TokenTable, teacher: TokenTable) -> Iterator[tuple[int, Row]]:
    controls = ControlTokens.of(student, teacher)
    for student_id, teacher_id in controls.ordinary.items():
        yield student_id, {teacher_id: 1.0}
    if controls.teacher_ends:
        end = controls.teacher_ends[0]
        eos = end if teacher.roles.eos is None else teacher.roles.eos
        for number, student_id in enumerate(controls.student_ends):
            is_eos = number > 0 and student_id == student.roles.eos
            yield student_id, {eos if is_eos else end: 1.0}


def _text_rows(
    student: TokenTable, teacher: TokenTable, encoder: TextEncoder, settings: ProjectionSettings
) -> Iterator[tuple[int, Row]]:
    if student.fingerprint == teacher.fingerprint:  # of two ids with the same bytes, each its own
        for token_id in np.flatnonzero(student.byte_lengths).tolist():
            yield token_id, {token_id: 1.0}
        return
    exact = _ids_by_bytes(teacher, encoder)
    strangers: list[int] = []
    for student_id, spelled in enumerate(student.all_bytes):
        if not spelled:
            continue
        teacher_id = exact.get(spelled)
        if teacher_id is None:
            strangers.append(student_id)
        else:
            yield student_id, {teacher_id: 1.0}
    spellings = [student.all_bytes[student_id] for student_id in strangers]
    segmentation = Segmentation(teacher, encoder, exact)
    for student_id, pieces in zip(strangers, segmentation.of_all(spellings), strict=True):
        row: dict[int, float] = {}
        weights = settings.piece_weights(len(pieces)) if pieces else []
        for piece, weight in zip(pieces, weights, strict=False):  # weights stop at max_length
            row[piece] = row.get(piece, 0.0) + weight
        if row:
            yield student_id, row


def _ids_by_bytes(teacher: TokenTable, encoder: TextEncoder) -> dict[bytes, int]:
    """Bytes -> teacher id; of several ids with the same bytes, the one that encoding them emits."""
    ids: dict[bytes, list[int]] = {}
    for token_id, spelled in enumerate(teacher.all_bytes):
        if spelled:
            ids.setdefault(spelled, []).append(token_id)
    chosen = {spelled: candidates[0] for spelled, candidates in ids.items()}
    for spelled, candidates in ids.items():
        if len(candidates) > 1 and (text := as_text(spelled)) is not None:
            emitted = encoder.encode(text)
            if len(emitted) == 1 and emitted[0] in candidates:
                chosen[spelled] = emitted[0]
    return chosen


def _from_rows(
    rows: Mapping[int, Row],
    student: TokenTable,
    teacher: TokenTable,
    real_ids: NDArray[np.bool_],
    settings: ProjectionSettings,
) -> ProjectionMatrix:
    entries = [
        (teacher_id, student_id, weight)
        for student_id, row in rows.items()
        for teacher_id, weight in row.items()
        if np.float32(weight) > 0  # decay ** r may be nothing in float32, or zero by choice
    ]
    entries.sort()
    columns = np.array([entry[0] for entry in entries], dtype=np.int64)
    column_starts = np.zeros(teacher.size + 1, dtype=np.int64)
    np.cumsum(np.bincount(columns, minlength=teacher.size), out=column_starts[1:])
    return ProjectionMatrix(
        student_fingerprint=student.fingerprint,
        teacher_fingerprint=teacher.fingerprint,
        student_width=len(real_ids),
        teacher_size=teacher.size,
        settings=settings,
        column_starts=column_starts,
        student_ids=np.array([entry[1] for entry in entries], dtype=np.int32),
        weights=np.array([entry[2] for entry in entries], dtype=np.float32),
        real_ids=real_ids,
    )
