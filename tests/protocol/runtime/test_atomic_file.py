"""Atomic writes: the content is on the disk before the name."""

import os
from pathlib import Path

import pytest

from mopd_protocol.runtime.atomic_file import (
    remove_folder,
    remove_leftovers,
    replacing,
    replacing_folder,
)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record synced and renamed paths, by final name, in order."""
    happened: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        happened.append(("sync", Path(f"/proc/self/fd/{descriptor}").resolve().name))
        fsync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        happened.append(("rename", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    return happened


def test_a_folder_is_on_the_disk_before_its_name_is(
    tmp_path: Path, order: list[tuple[str, str]]
) -> None:
    for _ in range(2):  # a new one, and in the place of an old one
        order.clear()
        with replacing_folder(tmp_path / "made") as temporary:
            (temporary / "inner").mkdir()
            (temporary / "inner" / "a").write_text("a")
            (temporary / "b").write_text("b")
        named = order.index(("rename", "made"))
        assert {("sync", name) for name in ("a", "b", "inner", temporary.name)} <= {*order[:named]}
        assert order.index(("sync", "a")) < order.index(("sync", "inner"))
        assert order[named + 1] == ("sync", tmp_path.name)
        assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_durable_file_is_on_the_disk_before_its_name_is(
    tmp_path: Path, order: list[tuple[str, str]]
) -> None:
    with replacing(tmp_path / "a", durable=True) as temporary:
        temporary.write_text("a")
    assert order == [("sync", temporary.name), ("rename", "a"), ("sync", tmp_path.name)]


def test_an_earlier_folder_comes_back_when_the_new_one_cannot_have_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "old").touch()
    replace = os.replace

    def refuse(source: Path, target: Path) -> None:
        if target == tmp_path / "made" and not Path(source).name.endswith(".old.part"):
            raise OSError("no")
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="no"), replacing_folder(tmp_path / "made") as temporary:
            (temporary / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "old"]


def test_a_removed_folder_is_never_incomplete_at_its_path(
    tmp_path: Path, order: list[tuple[str, str]]
) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "a").touch()
    remove_folder(tmp_path / "made")
    assert order[0][0] == "rename"
    assert order[0][1].endswith(".part")
    assert not list(tmp_path.iterdir())


def test_only_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    for name in ("step-1", ".hidden", "a.part", ".a.part"):
        (tmp_path / name).mkdir()
    for name in (".step-1.12.part", ".step-1.12.old.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    (tmp_path / ".journal.jsonl.7.part").touch()
    leftovers = [".journal.jsonl.7.part", ".step-1.12.old.part", ".step-1.12.part"]
    assert [path.name for path in remove_leftovers(tmp_path)] == leftovers
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", ".hidden", "a.part", ".a.part"}
    assert remove_leftovers(tmp_path / "none") == []
