"""``mopd``: invalid runs are rejected with a one-line error before any file is created."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.errors import DataError, MopdError
from mopd_trainer import check
from mopd_trainer.cli.main import main
from tests import tiny_models
from tests.trainer.runs import prompt_lines, run_values, write_lines, write_run
from tests.trainer.students import model_of, tokenizer

Change = Callable[[Path, dict[str, Any]], object]

MOPD = Path(sys.executable).parent / "mopd"
COMMANDS = ("train", "check")


def unknown_setting(folder: Path, values: dict[str, Any]) -> None:
    values["student"]["learning_rat"] = 1.0


def no_run_file(folder: Path, values: dict[str, Any]) -> None:
    (folder / "run.yaml").unlink()


def no_prompts(folder: Path, values: dict[str, Any]) -> None:
    (folder / "prompts.jsonl").unlink()


def unknown_teacher(folder: Path, values: dict[str, Any]) -> None:
    lines = [*prompt_lines(3), {"prompt": "?", "teacher": "history"}]
    write_lines(folder / "prompts.jsonl", lines)


def no_model(folder: Path, values: dict[str, Any]) -> None:
    values["student"]["model"] = str(folder / "missing")


def unreachable_teacher(folder: Path, values: dict[str, Any]) -> None:
    del values["teachers"]["code"]
    values["teacher_wait_seconds"] = 0.05
    write_lines(folder / "prompts.jsonl", prompt_lines(3, ["math"]))


def existing_run(folder: Path, values: dict[str, Any]) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "journal.jsonl").write_text('{"step": 1}\n')


#: What is wrong, and the part of the message that names it.
INVALID: list[tuple[Change, str]] = [
    (unknown_setting, "run.yaml: student.learning_rat: "),
    (no_run_file, "run.yaml: file not found"),
    (no_prompts, "prompts.jsonl: file not found"),
    (unknown_teacher, "prompts.jsonl:4: "),
    (no_model, "missing' "),
    (unreachable_teacher, "teacher 'math'"),
    (existing_run, "output_dir: "),
]


@pytest.fixture(scope="session")
def student_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    return tiny_models.save(model_of("qwen"), tokenizer("digit"), folder)


def invalid_run(folder: Path, student: Path, change: Change) -> Path:
    """Write a run with one error."""
    values = run_values(folder)
    values["student"]["model"] = str(student)
    write_lines(folder / "prompts.jsonl", prompt_lines(4))
    path = folder / "run.yaml"
    path.touch()
    change(folder, values)
    return write_run(folder, values) if path.exists() else path


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Return all files with their contents, and all folders with None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("change", "part"), INVALID)
def test_invalid_run_is_rejected_before_anything_is_written(
    tmp_path: Path,
    student_folder: Path,
    capsys: pytest.CaptureFixture[str],
    change: Change,
    part: str,
    command: str,
) -> None:
    path = invalid_run(tmp_path, student_folder, change)
    before = snapshot(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main([command, str(path)])
    message = capsys.readouterr().err
    assert caught.value.code == 2
    assert message.startswith("mopd: ")
    assert part in message
    assert len(message.splitlines()) == 1
    assert snapshot(tmp_path) == before


def test_library_function_raises_the_error(tmp_path: Path, student_folder: Path) -> None:
    path = invalid_run(tmp_path, student_folder, existing_run)
    with pytest.raises(MopdError) as caught:
        check(path, max_steps=1)
    assert caught.value.key == "output_dir"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "part", "command"),
    [(*INVALID[0], "train"), (*INVALID[3], "check"), (*INVALID[5], "train")],
)
def test_error_is_one_sentence_on_stderr_with_exit_code_2(
    tmp_path: Path, student_folder: Path, change: Change, part: str, command: str
) -> None:
    path = invalid_run(tmp_path, student_folder, change)
    before = snapshot(tmp_path)
    result = subprocess.run(
        [MOPD, command, path], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith("mopd: ")
    assert part in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert snapshot(tmp_path) == before


@pytest.mark.smoke
def test_invalid_data_is_reported_before_torch_is_imported(
    tmp_path: Path, student_folder: Path
) -> None:
    path = invalid_run(tmp_path, student_folder, unknown_teacher)
    script = """
import sys
from mopd_trainer.cli.main import main
for command in ("train", "check"):
    try:
        main([command, sys.argv[1]])
    except SystemExit as error:
        print(error.code, "torch" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, check=True
    )
    assert result.stderr.count("prompts.jsonl:4: ") == 2
    assert result.stdout == "2 False\n" * 2


def test_other_exceptions_in_a_group_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise ExceptionGroup("both", [DataError("invalid data"), TypeError("a bug")])

    monkeypatch.setattr("mopd_trainer.cli.run._check", broken)
    with pytest.raises(ExceptionGroup):
        main(["check", "run.yaml"])


def test_error_in_nested_groups_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def invalid(*arguments: object) -> None:
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [DataError("invalid data")])])

    monkeypatch.setattr("mopd_trainer.cli.run._train", invalid)
    with pytest.raises(SystemExit) as caught:
        main(["train", "run.yaml"])
    assert (caught.value.code, capsys.readouterr().err) == (2, "mopd: invalid data\n")


@pytest.mark.smoke
def test_help_and_version_import_nothing_heavy() -> None:
    script = """
import json, sys
from mopd.__main__ import main
commands = ("train", "check", "report", "merge", "demo", "align", "projection")
for arguments in (["--help"], ["--version"], *([command, "--help"] for command in commands)):
    try:
        main(arguments)
    except SystemExit as error:
        assert error.code == 0
heavy = {"torch", "transformers", "httpx", "rich", "numpy", "pydantic", "omegaconf"}
print(json.dumps(sorted(heavy & sys.modules.keys())))
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    *lines, imported = result.stdout.splitlines()
    assert json.loads(imported) == []
    output = "\n".join(lines)
    for command in ("train", "check", "report", "merge", "demo", "align", "projection"):
        assert f"usage: mopd {command} " in output
