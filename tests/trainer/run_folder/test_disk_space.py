"""The announced disk space is that of the files."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from mopd_protocol.samples import Message, Prompt
from mopd_trainer.reporting.plan import describe_plan, size_text
from mopd_trainer.run_folder.disk_space import checkpoint_size, kept_checkpoints, peak_space
from tests.trainer.run_folder.test_checkpoint import config_of, manager, stepped
from tests.trainer.students import student_of


@pytest.mark.parametrize(
    ("settings", "kept", "peak"),
    [
        ({}, 1, 1),  # at the end only
        ({"save_steps": 4}, 2, 3),
        ({"save_steps": 5}, 2, 3),
        ({"save_steps": 1}, 2, 3),
        ({"save_steps": 1, "keep_checkpoints": 0}, 12, 12),
        ({"save_steps": 6, "keep_checkpoints": 9}, 2, 2),
        ({"save_steps": 1, "best_checkpoint_metric": "loss"}, 3, 4),
    ],
)
def test_kept_checkpoints(
    tmp_path: Path, settings: dict[str, object], kept: int, peak: int
) -> None:
    config = config_of(tmp_path, max_steps=12, **settings)
    assert kept_checkpoints(config) == kept
    assert peak_space(config, 10) == 10 * (12 * peak + 4)


def test_announced_size_is_that_of_the_files(tmp_path: Path) -> None:
    config = config_of(tmp_path, max_steps=5, save_steps=1)
    student, checkpoints = student_of(), manager(config)
    optimizer = stepped(student)
    for step in range(1, 6):
        checkpoints.save(step, student, optimizer)
    names = ("model.safetensors", "optimizer.pt")
    files = [path for name in names for path in tmp_path.rglob(name)]
    size = kept_checkpoints(config) * checkpoint_size(config, student.identity.trained)
    assert sum(path.stat().st_size for path in files) == pytest.approx(size, rel=0.05)


def test_the_plan_has_the_disk_space(tmp_path: Path) -> None:
    config, student = config_of(tmp_path, max_steps=12, save_steps=4), student_of().identity
    message = Message(role="user", content="?")
    prompt, output = Prompt(0, (message,), {"math": 1.0}), StringIO()
    Console(file=output, width=300).print(describe_plan(config, [prompt], student, {}))
    assert size_text(peak_space(config, student.trained)) in output.getvalue()
    assert [size_text(size) for size in (4_500_000_000, 593_000)] == ["4.5 GB", "0.593 MB"]
