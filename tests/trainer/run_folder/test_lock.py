"""One process at a time writes into a run's folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from mopd_protocol.errors import ConfigError
from mopd_trainer.run_folder.lock import run_lock
from tests.trainer.runs import run_values, write_lines
from tests.trainer.whole_runs import run_here

HOLD = """
import sys
from pathlib import Path
from mopd_trainer.run_folder.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with run_lock(folder):
        refused = pytest.raises(ConfigError, match="another process is writing a run into")
        with refused, run_lock(folder):
            pass
        (folder / "journal.jsonl").touch()
    with run_lock(folder):
        assert [path.name for path in folder.iterdir()] == ["journal.jsonl"]


@pytest.mark.smoke
def test_a_killed_writer_lets_go(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(ConfigError), run_lock(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    with run_lock(tmp_path):
        pass


def test_a_folder_that_nothing_was_written_to_goes_again(tmp_path: Path) -> None:
    with pytest.raises(KeyError), run_lock(tmp_path / "new"):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = pytest.raises(ConfigError, match=r"output_dir .*run cannot be made: Not a directory")
    with refused, run_lock(tmp_path / "file" / "run"):
        pass


def test_a_folder_that_takes_no_files_is_told() -> None:
    folder = Path("/proc/self")  # nobody may write here, not even root
    if not folder.is_dir():
        pytest.skip("no /proc on this system")
    with (
        pytest.raises(ConfigError, match="output_dir /proc/self takes no files"),
        run_lock(folder),
    ):
        pass


def test_a_run_is_refused_before_anything_is_read_of_it(tmp_path: Path) -> None:
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": "?", "teacher": "math"}])
    values = run_values(tmp_path, max_steps=1)
    with run_lock(tmp_path / "run"):
        with pytest.raises(ConfigError, match="another process is writing"):
            run_here(values)
        assert not list((tmp_path / "run").iterdir())
