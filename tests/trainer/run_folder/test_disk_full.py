"""A disk that takes no more: nothing is half-written, and what was there stays whole."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mopd_protocol.errors import DataError
from mopd_trainer.run_folder.checkpoint import Checkpoint, save_student
from mopd_trainer.run_folder.journal import COMPLETIONS, JOURNAL, Journal
from tests.trainer.judged import example
from tests.trainer.run_folder.test_checkpoint import config_of, everything_under, save
from tests.trainer.students import ids_of, rollout, student_of


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file grows beyond ``size`` bytes: the kernel refuses, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("fills", ["model/model.safetensors", "optimizer.pt", "model/config.json"])
def test_a_checkpoint_that_the_disk_does_not_take_is_not_there(tmp_path: Path, fills: str) -> None:
    config = config_of(tmp_path)
    student = student_of()
    folder = save(config, 1, student)
    before = everything_under(tmp_path)
    # The optimizer's file is the largest, and the model's is larger than the other ones.
    limit = (folder / fills).stat().st_size - 1
    refused = pytest.raises(DataError, match="step-00000002: the checkpoint of step 2 cannot be")
    with files_of_at_most(limit), refused as told:
        save(config, 2, student)
    sentence = str(told.value)
    assert "\n" not in sentence
    assert "File too large" in sentence
    assert " bytes needed, " in sentence
    assert sentence.endswith("make room, and go on with resume_from_checkpoint=true")
    assert everything_under(tmp_path) == before
    assert Checkpoint.open(folder).step == 1


def test_too_little_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = student_of()
    weights = sum(4 * parameter.numel() for parameter in student.model.parameters())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=weights - 1))
    with pytest.raises(
        DataError, match=rf"No space left on device \([\d,]+ bytes needed, {weights - 1:,} free"
    ):
        save_student(student, tmp_path / "final")
    assert not list(tmp_path.iterdir())


def test_an_error_that_is_no_full_disk_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*arguments: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("mopd_trainer.run_folder.checkpoint.torch.save", lost)
    with pytest.raises(RuntimeError, match="CUDA error"):
        save(config_of(tmp_path), 1, student_of())


@pytest.mark.parametrize("name", [JOURNAL, COMPLETIONS])
@pytest.mark.parametrize("room", [0, 1, 30])
def test_a_line_that_the_disk_does_not_take_leaves_the_lines_before_it(
    tmp_path: Path, name: str, room: int
) -> None:
    shown = example(rollout("digit", ids_of("digit", "7")))

    def write(journal: Journal, step: int) -> None:
        if name == JOURNAL:
            journal.write(step, {"loss": 1.5, "grad_norm": 2.5})
        else:
            journal.write_completion(step, shown)

    with Journal(tmp_path, from_step=0, tensorboard=False) as journal:
        write(journal, 1)
        size = (tmp_path / name).stat().st_size
        with (
            files_of_at_most(size + room),
            pytest.raises(DataError, match=rf"{name}: the next line .*: File too large .* whole"),
        ):
            write(journal, 2)
        assert (tmp_path / name).stat().st_size == size
        write(journal, 3)  # somebody made room
    found: list[Any] = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert [line["step"] for line in found] == [1, 3]
