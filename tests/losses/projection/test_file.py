"""Projection files: saved atomically, validated when loaded."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from mopd_losses.config import ProjectionSettings
from mopd_losses.projection import matrix as projection_module
from mopd_losses.projection.matrix import ProjectionMatrix, build_projection
from mopd_protocol.errors import DataError
from tests.losses.families import family

ARRAYS = ("column_starts", "student_ids", "weights", "real_ids")


@pytest.fixture
def matrix() -> ProjectionMatrix:
    student, teacher = family("digit"), family("sentencepiece")
    return build_projection(
        student.table,
        teacher.table,
        teacher.encoder,
        student_width=student.logit_width,
        settings=ProjectionSettings(weights="decay", decay=0.2),
    )


def contents(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in ARRAYS}, dict(file.metadata())


def test_a_saved_matrix_comes_back_as_it_was(matrix: ProjectionMatrix, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "projection.safetensors"
    matrix.save(path)
    loaded = ProjectionMatrix.load(path)
    assert loaded.key == matrix.key
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(matrix, name))
        assert getattr(loaded, name).dtype == getattr(matrix, name).dtype
    for name in ("student_fingerprint", "teacher_fingerprint", "student_width", "teacher_size"):
        assert getattr(loaded, name) == getattr(matrix, name)
    assert loaded.settings == matrix.settings


def test_saving_twice_writes_the_same_bytes(matrix: ProjectionMatrix, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    matrix.save(first)
    ProjectionMatrix.load(first).save(second)
    assert contents(first)[1] == contents(second)[1]
    assert ProjectionMatrix.load(second).key == matrix.key


def test_a_matrix_serves_only_the_two_tokenizers_it_was_built_for(
    matrix: ProjectionMatrix,
) -> None:
    student, teacher = matrix.student_fingerprint, matrix.teacher_fingerprint
    matrix.require(student, teacher)
    with pytest.raises(DataError, match="built for student tokenizer"):
        matrix.require(teacher, teacher)
    with pytest.raises(DataError, match="built for teacher tokenizer"):
        matrix.require(student, student)


def test_a_file_of_another_builder_is_refused(
    matrix: ProjectionMatrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old"
    matrix.save(path)
    monkeypatch.setattr(projection_module, "BUILDER_VERSION", 99)
    with pytest.raises(DataError, match="builder 1, this is 99"):
        ProjectionMatrix.load(path)


@pytest.mark.parametrize("kept", [0, 7, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(matrix: ProjectionMatrix, tmp_path: Path, kept: float) -> None:
    path = tmp_path / "cut"
    matrix.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept if isinstance(kept, int) else kept * len(whole))])
    with pytest.raises(DataError, match="cut"):
        ProjectionMatrix.load(path)


def test_a_missing_or_invalid_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing"):
        ProjectionMatrix.load(tmp_path / "missing")
    other = tmp_path / "other"
    other.write_bytes(b"no tensors here, only text that is long enough to be a header")
    with pytest.raises(DataError, match="other"):
        ProjectionMatrix.load(other)
    save_file({"weights": np.zeros(3, dtype=np.float32)}, tmp_path / "bare")
    with pytest.raises(DataError, match="bare"):
        ProjectionMatrix.load(tmp_path / "bare")


@pytest.mark.parametrize(
    "metadata",
    [
        {"settings": "{"},
        {"settings": '{"weights": "unheard of"}'},
        {"student_width": "wide"},
        {"teacher_size": "3"},
        {"student_width": "3"},
        {"builder_version": "new"},
    ],
)
def test_metadata_that_makes_no_sense_is_refused_with_the_files_name(
    matrix: ProjectionMatrix, tmp_path: Path, metadata: dict[str, str]
) -> None:
    path = tmp_path / "odd"
    matrix.save(path)
    arrays, stored = contents(path)
    save_file(arrays, path, metadata=stored | metadata)
    with pytest.raises(DataError, match="odd"):
        ProjectionMatrix.load(path)


@pytest.mark.parametrize("missing", ARRAYS)
def test_missing_or_empty_arrays_are_refused(
    matrix: ProjectionMatrix, tmp_path: Path, missing: str
) -> None:
    path = tmp_path / "odd"
    matrix.save(path)
    arrays, stored = contents(path)
    save_file(arrays | {missing: arrays[missing][:0]}, path, metadata=stored)
    with pytest.raises(DataError, match="odd"):
        ProjectionMatrix.load(path)
    save_file({n: a for n, a in arrays.items() if n != missing}, path, metadata=stored)
    with pytest.raises(DataError, match="odd"):
        ProjectionMatrix.load(path)


def test_a_failed_save_leaves_nothing_and_an_older_file_as_it_was(
    matrix: ProjectionMatrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_written(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError("disk full")

    older = tmp_path / "older"
    matrix.save(older)
    before = older.read_bytes()
    monkeypatch.setattr(Path, "write_bytes", half_written)
    for path in (older, tmp_path / "new"):
        with pytest.raises(DataError, match=rf"{path.name} cannot be written: disk full; name a"):
            matrix.save(path)
    assert [path.name for path in tmp_path.iterdir()] == ["older"]
    assert older.read_bytes() == before
