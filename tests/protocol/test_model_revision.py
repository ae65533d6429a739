"""A teacher's revision follows its weights."""

from pathlib import Path

from mopd_protocol.model_revision import hash_of_weights


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
