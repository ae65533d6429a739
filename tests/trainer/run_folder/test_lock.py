"""Only one process writes to a run folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from mopd_protocol.errors import ConfigError, DiskError
from mopd_trainer.run_folder.lock import run_lock
from tests.trainer.runs import run_values, write_lines
from tests.trainer.whole_runs import run_here

LOCK = """
import sys
from pathlib import Path
from mopd_trainer.run_folder.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_second_process_is_rejected_until_the_first_ends(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with run_lock(folder):
        with pytest.raises(ConfigError) as caught, run_lock(folder):
            pass
        assert caught.value.key == "output_dir"
        (folder / "journal.jsonl").touch()
    with run_lock(folder):
        assert [path.name for path in folder.iterdir()] == ["journal.jsonl"]


@pytest.mark.smoke
def test_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    with pytest.raises(ConfigError), run_lock(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    with run_lock(tmp_path):
        pass


def test_empty_folder_is_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyError), run_lock(tmp_path / "new"):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_folder_that_cannot_be_created_or_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folders = [tmp_path / "file" / "run"]
    folders += [Path("/proc/self")] if Path("/proc/self").is_dir() else []  # not writable
    for folder in folders:
        with pytest.raises(DiskError) as caught, run_lock(folder):
            pass
        assert caught.value.key == str(folder)


def test_locked_run_is_rejected_before_it_changes_anything(tmp_path: Path) -> None:
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": "?", "teacher": "math"}])
    values = run_values(tmp_path, max_steps=1)
    with run_lock(tmp_path / "run"):
        with pytest.raises(ConfigError) as caught:
            run_here(values)
        assert caught.value.key == "output_dir"
        assert not list((tmp_path / "run").iterdir())
