"""Full disk: no partial files, and existing files are unchanged."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mopd_protocol.errors import DiskError
from mopd_trainer.run_folder.checkpoint import Checkpoint, save_student
from mopd_trainer.run_folder.files import COMPLETIONS, JOURNAL
from mopd_trainer.run_folder.journal import Journal
from mopd_trainer.run_folder.logged_completion import logged_completion
from tests.trainer.run_folder.test_checkpoint import config_of, files_under, save
from tests.trainer.scored_examples import example
from tests.trainer.students import ids_of, rollout, student_of


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of files: the kernel raises an error as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("fills", ["model/model.safetensors", "optimizer.pt", "model/config.json"])
def test_failed_save_leaves_no_partial_checkpoint(tmp_path: Path, fills: str) -> None:
    config = config_of(tmp_path)
    student = student_of()
    folder = save(config, 1, student)
    before = files_under(tmp_path)
    # The optimizer's file is the largest, followed by the model's.
    limit = (folder / fills).stat().st_size - 1
    with files_of_at_most(limit), pytest.raises(DiskError, match="File too large") as caught:
        save(config, 2, student)
    assert caught.value.key == str(folder.parent / "step-00000002")
    assert "\n" not in str(caught.value)
    assert files_under(tmp_path) == before
    assert Checkpoint.open(folder).step == 1


def test_free_space_is_checked_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = student_of()
    weights = sum(4 * parameter.numel() for parameter in student.model.parameters())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=weights - 1))
    with pytest.raises(DiskError, match=f"{weights - 1:,} free") as caught:
        save_student(student, tmp_path / "final")
    assert caught.value.key == str(tmp_path / "final")
    assert not list(tmp_path.iterdir())


def test_other_errors_are_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("mopd_trainer.run_folder.checkpoint.torch.save", fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        save(config_of(tmp_path), 1, student_of())


@pytest.mark.parametrize("name", [JOURNAL, COMPLETIONS])
@pytest.mark.parametrize("room", [0, 1, 30])
def test_failed_line_leaves_the_previous_lines(tmp_path: Path, name: str, room: int) -> None:
    shown = example(rollout("digit", ids_of("digit", "7")))

    def write(journal: Journal, step: int) -> None:
        if name == JOURNAL:
            journal.write(step, {"loss": 1.5, "grad_norm": 2.5})
        else:
            journal.write_completions([logged_completion(step, shown)])

    with Journal(tmp_path, from_step=0, tensorboard=False) as journal:
        write(journal, 1)
        size = (tmp_path / name).stat().st_size
        with (
            files_of_at_most(size + room),
            pytest.raises(DiskError, match="File too large") as caught,
        ):
            write(journal, 2)
        assert caught.value.key == str(tmp_path / name)
        assert (tmp_path / name).stat().st_size == size
        write(journal, 3)
    lines: list[Any] = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 3]
