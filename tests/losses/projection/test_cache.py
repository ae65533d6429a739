"""One matrix on the CPU, one copy a device, and one file for what was built."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mopd_losses.config import ProjectionSettings
from mopd_losses.projection import cache as cache_module
from mopd_losses.projection.cache import DeviceProjection, ProjectionCache, cache_key
from mopd_losses.projection.matrix import ProjectionMatrix, build_projection
from mopd_protocol.errors import DataError
from mopd_protocol.tokenizers.token_table import TokenRoles, TokenTable
from tests.losses.families import Family, family

TENSORS = ("column_starts", "student_ids", "log_weights", "real_ids", "unprojected_ids")


def cached(cache: ProjectionCache, student: Family, teacher: Family) -> ProjectionMatrix:
    return cache.matrix(
        student.table, teacher.table, teacher.encoder, student_width=student.logit_width
    )


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[ProjectionMatrix]:
    """Every matrix that a cache really built."""
    record: list[ProjectionMatrix] = []

    def recording(*sides: object, **named: object) -> ProjectionMatrix:
        record.append(build_projection(*sides, **named))
        return record[-1]

    monkeypatch.setattr(cache_module, "build_projection", recording)
    return record


def test_a_cache_builds_a_pair_once(built: list[ProjectionMatrix]) -> None:
    cache = ProjectionCache()
    left, right = family("digit"), family("sentencepiece")
    assert cached(cache, left, right) is cached(cache, left, right)
    assert len(built) == 1
    assert cached(cache, right, left) is not cached(cache, left, right)
    assert len(built) == 2


def test_a_second_cache_reads_the_first_ones_file(
    tmp_path: Path, built: list[ProjectionMatrix]
) -> None:
    left, right = family("digit"), family("sentencepiece")
    first = cached(ProjectionCache(tmp_path), left, right)
    second = cached(ProjectionCache(tmp_path), left, right)
    assert len(built) == 1
    assert first.key == second.key
    assert len(list(tmp_path.iterdir())) == 1


def test_what_stands_in_the_file_is_what_is_used(tmp_path: Path) -> None:
    left, right = family("digit"), family("sentencepiece")
    cached(ProjectionCache(tmp_path), left, right)
    (path,) = tmp_path.iterdir()
    other = build_projection(
        left.table,
        right.table,
        right.encoder,
        student_width=left.logit_width,
        settings=ProjectionSettings(weights="decay"),
    )
    other.save(path)
    assert cached(ProjectionCache(tmp_path), left, right).key == other.key


def test_a_file_of_another_pair_under_this_pairs_name_is_refused(tmp_path: Path) -> None:
    left, right = family("digit"), family("sentencepiece")
    cached(ProjectionCache(tmp_path), left, right)
    (path,) = tmp_path.iterdir()
    cached(ProjectionCache(), right, left).save(path)
    with pytest.raises(DataError, match="projection was built for"):
        cached(ProjectionCache(tmp_path), left, right)


def test_a_damaged_file_is_built_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left, right = family("digit"), family("sentencepiece")
    built = cached(ProjectionCache(tmp_path), left, right)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert cached(ProjectionCache(tmp_path), left, right).key == built.key
    assert f"{path}" in caplog.text
    assert ProjectionMatrix.load(path).key == built.key


def with_roles(table: TokenTable, roles: TokenRoles) -> TokenTable:
    return replace(table, roles=roles)


def test_the_key_depends_on_everything_that_decides_a_projection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, right = family("digit").table, family("sentencepiece").table
    plain = ProjectionSettings()

    def key(
        student: TokenTable = left,
        teacher: TokenTable = right,
        width: int = 500,
        settings: ProjectionSettings = plain,
    ) -> str:
        return cache_key(student, teacher, student_width=width, settings=settings)

    keys = [
        key(),
        key(student=right, teacher=left),
        key(student=family("whole_number").table),
        key(teacher=family("whole_number").table),
        key(student=with_roles(left, TokenRoles(eos=1))),
        key(teacher=with_roles(right, TokenRoles(eos=1))),
        key(width=501),
        key(settings=ProjectionSettings(weights="decay")),
        key(settings=ProjectionSettings(weights="decay", decay=0.2)),
        key(settings=ProjectionSettings(weights="decay", max_length=3)),
    ]
    monkeypatch.setattr(cache_module, "BUILDER_VERSION", 99)
    keys.append(key())
    assert len(set(keys)) == len(keys)
    monkeypatch.undo()
    assert key() == keys[0]


def test_each_device_has_its_own_copy_moved_once() -> None:
    cache = ProjectionCache()
    matrix = cached(cache, family("digit"), family("sentencepiece"))
    on_meta, on_cpu = cache.on("meta", matrix), cache.on("cpu", matrix)
    assert {getattr(on_meta, name).device.type for name in TENSORS} == {"meta"}
    assert {getattr(on_cpu, name).device.type for name in TENSORS} == {"cpu"}
    assert cache.on(torch.device("cpu"), matrix) is on_cpu
    assert cache.on(torch.device("meta"), matrix) is on_meta
    assert cache.on("cpu", cached(cache, family("digit"), family("sentencepiece"))) is on_cpu
    # A device is also named by its number: "cuda" and "cuda:0" are one memory.
    assert cache.on("meta:0", matrix) is on_meta
    assert cache.on(torch.device("cpu", 0), matrix) is on_cpu


def test_two_matrices_do_not_share_a_copy() -> None:
    cache = ProjectionCache()
    forward = cached(cache, family("digit"), family("sentencepiece"))
    back = cached(cache, family("sentencepiece"), family("digit"))
    assert cache.on("cpu", forward) is not cache.on("cpu", back)


def test_a_copy_on_the_cpu_shares_no_memory_with_the_matrix_or_with_another_copy() -> None:
    matrix = cached(ProjectionCache(), family("digit"), family("sentencepiece"))
    first, second = (ProjectionCache().on("cpu", matrix) for _ in range(2))
    own = [matrix.column_starts, matrix.student_ids, matrix.weights, matrix.real_ids]
    for name in TENSORS:
        first_array = getattr(first, name).numpy()
        assert not np.shares_memory(first_array, getattr(second, name).numpy())
        assert not any(np.shares_memory(first_array, array) for array in own)
    key, before = matrix.key, matrix.dense()
    first.log_weights.fill_(7)
    first.column_starts.zero_()
    first.real_ids.logical_not_()
    assert (matrix.dense() == before).all()
    assert matrix.key == key
    assert second.log_weights.max() <= 0


def test_the_copy_equals_the_matrix() -> None:
    matrix = cached(ProjectionCache(), family("digit"), family("sentencepiece"))
    copy = DeviceProjection.copy_of(matrix, torch.device("cpu"))
    np.testing.assert_array_equal(copy.column_starts, matrix.column_starts)
    np.testing.assert_array_equal(copy.student_ids, matrix.student_ids)
    np.testing.assert_allclose(copy.log_weights.exp(), matrix.weights, rtol=1e-6)
    np.testing.assert_array_equal(copy.real_ids, matrix.real_ids)
    empty = (matrix.dense().sum(axis=1) == 0) & matrix.real_ids
    np.testing.assert_array_equal(copy.unprojected_ids, np.flatnonzero(empty))
