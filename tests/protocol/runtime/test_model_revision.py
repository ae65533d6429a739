"""A teacher's revision follows its weights."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from mopd_protocol.runtime.model_revision import (
    hash_of_weights,
    is_missing_folder,
    name_of,
    revision_of,
)


def folder(path: Path, weights: bytes, config: str = "{}") -> Path:
    path.mkdir()
    (path / "config.json").write_text(config)
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_other_weights_or_another_configuration_are_another_revision(tmp_path: Path) -> None:
    first = hash_of_weights(folder(tmp_path / "a", b"abc"))
    assert hash_of_weights(folder(tmp_path / "b", b"abc")) == first
    assert hash_of_weights(folder(tmp_path / "c", b"abd")) != first
    assert hash_of_weights(folder(tmp_path / "d", b"abc", '{"rope": 2}')) != first


def test_large_files_are_sampled_from_end_to_end(tmp_path: Path) -> None:
    weights = bytearray(5_000_000)
    first = hash_of_weights(folder(tmp_path / "a", bytes(weights)))
    weights[-1] = 1
    assert hash_of_weights(folder(tmp_path / "b", bytes(weights))) != first
    longer = bytes(5_000_001)
    assert hash_of_weights(folder(tmp_path / "c", longer)) != first
    trained = bytes(byte for _ in range(2_500_000) for byte in (0, 1))
    assert hash_of_weights(folder(tmp_path / "d", trained)) != first


def test_the_revision_of_a_folder_is_its_hash_for_any_requested_revision(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "a", b"abc"), folder(tmp_path / "b", b"abd")
    of_first = revision_of(str(first), None, requested="v1")
    assert of_first == hash_of_weights(first)
    assert of_first != revision_of(str(second), None, requested="v1")


@pytest.mark.parametrize(
    ("commit", "requested", "expected"),
    [
        ("9f8e", None, "9f8e"),
        ("9f8e", "main", "9f8e"),
        (None, "main", "main"),
        (None, None, "unknown"),
    ],
)
def test_a_branch_of_the_hub_is_known_by_its_commit(
    commit: str | None, requested: str | None, expected: str
) -> None:
    config = SimpleNamespace(_commit_hash=commit)
    assert revision_of("org/model", config, requested=requested) == expected


def test_a_folder_has_one_name_wherever_it_is_called_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = folder(tmp_path / "math", b"abc")
    monkeypatch.chdir(inside)
    for spelled in (str(inside), f"{inside}/", ".", "./", "../math"):
        assert name_of(spelled) == "math"
    assert name_of("org/model") == "org/model"


def test_a_path_is_not_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    missing = ("./x", "../x", "~/x", "/x/y", "a/b/c", "runs/x", "a b", "x/")
    assert all(is_missing_folder(name) for name in missing)
    assert not any(is_missing_folder(name) for name in ("gpt2", "Qwen/Qwen3-0.6B", "runs", "."))
