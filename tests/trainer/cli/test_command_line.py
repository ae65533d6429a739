"""``mopd``: what it refuses, it refuses in one sentence, before anything is written."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mopd_trainer.cli.main import main
from tests import tiny_models
from tests.trainer.runs import questions, run_values, write_lines, write_run
from tests.trainer.students import model_of, tokenizer

Arrange = Callable[[Path, dict[str, Any]], object]

MOPD = Path(sys.executable).parent / "mopd"
COMMANDS = ("train", "check")


def unknown_key(folder: Path, values: dict[str, Any]) -> None:
    values["student"]["learning_rat"] = 1.0


def no_run_file(folder: Path, values: dict[str, Any]) -> None:
    (folder / "run.yaml").unlink()


def no_prompts(folder: Path, values: dict[str, Any]) -> None:
    (folder / "prompts.jsonl").unlink()


def unknown_teacher(folder: Path, values: dict[str, Any]) -> None:
    lines = [*questions(3), {"prompt": "?", "teacher": "history"}]
    write_lines(folder / "prompts.jsonl", lines)


def no_model(folder: Path, values: dict[str, Any]) -> None:
    values["student"]["model"] = str(folder / "nobody")


def no_teacher_there(folder: Path, values: dict[str, Any]) -> None:
    del values["teachers"]["code"]
    values["teacher_wait_seconds"] = 0.05
    write_lines(folder / "prompts.jsonl", questions(3, ["math"]))


def a_run_is_there(folder: Path, values: dict[str, Any]) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "journal.jsonl").write_text('{"step": 1}\n')


REFUSALS = [
    (unknown_key, "run.yaml: student.learning_rat: unknown setting"),
    (no_run_file, "run.yaml: file not found"),
    (no_prompts, "prompts.jsonl: no such file; expected prompts as JSONL (data.prompts)"),
    (
        unknown_teacher,
        "prompts.jsonl:4: teacher 'history' is unknown; known teachers are code, math",
    ),
    (no_model, "nobody' cannot be loaded: "),
    (no_teacher_there, "teacher 'math' is unreachable: "),
    (a_run_is_there, "already holds a run; set resume_from_checkpoint=true"),
]


@pytest.fixture(scope="session")
def student_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    return tiny_models.save(model_of("qwen"), tokenizer("digit"), folder)


def arranged(folder: Path, student: Path, arrange: Arrange) -> Path:
    """A run in which one thing is wrong."""
    values = run_values(folder)
    values["student"]["model"] = str(student)
    write_lines(folder / "prompts.jsonl", questions(4))
    path = folder / "run.yaml"
    path.touch()
    arrange(folder, values)
    return write_run(folder, values) if path.exists() else path


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file with its content, every folder with None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("arrange", "sentence"), REFUSALS)
def test_a_run_that_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path,
    student_folder: Path,
    capsys: pytest.CaptureFixture[str],
    arrange: Arrange,
    sentence: str,
    command: str,
) -> None:
    path = arranged(tmp_path, student_folder, arrange)
    before = snapshot(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([command, str(path)])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith("mopd: ")
    assert sentence in told
    assert len(told.splitlines()) == 1
    assert snapshot(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arrange", "sentence", "command"),
    [
        (*REFUSALS[0], "train"),
        (*REFUSALS[3], "check"),
        (*REFUSALS[5], "train"),
    ],
)
def test_a_refusal_is_one_sentence_on_stderr_and_exit_code_2(
    tmp_path: Path, student_folder: Path, arrange: Arrange, sentence: str, command: str
) -> None:
    path = arranged(tmp_path, student_folder, arrange)
    before = snapshot(tmp_path)
    ended = subprocess.run(
        [MOPD, command, path], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("mopd: ")
    assert sentence in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == ""
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_line_of_the_data_is_told_before_torch_is_loaded(
    tmp_path: Path, student_folder: Path, command: str
) -> None:
    path = arranged(tmp_path, student_folder, unknown_teacher)
    script = """
import sys
from mopd_trainer.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    print(ended.code, "torch" in sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, command, path], capture_output=True, text=True, check=True
    )
    assert "prompts.jsonl:4: teacher 'history' is unknown" in ended.stderr
    assert ended.stdout == "2 False\n"


def test_a_bug_beside_a_refusal_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        from mopd_protocol.errors import DataError

        raise ExceptionGroup("both", [DataError("wrong data"), TypeError("our bug")])

    monkeypatch.setattr("mopd_trainer.cli.run._check", broken)
    with pytest.raises(ExceptionGroup):
        main(["check", "run.yaml"])


def test_a_refusal_inside_a_group_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: object) -> None:
        from mopd_protocol.errors import DataError

        raise ExceptionGroup("one", [ExceptionGroup("in one", [DataError("wrong data")])])

    monkeypatch.setattr("mopd_trainer.cli.run._train", refused)
    with pytest.raises(SystemExit) as ended:
        main(["train", "run.yaml"])
    assert (ended.value.code, capsys.readouterr().err) == (2, "mopd: wrong data\n")


def test_help_loads_nothing_heavy() -> None:
    script = """
import json, sys
from mopd.__main__ import main
for arguments in (["--help"], ["train", "--help"], ["check", "--help"], ["demo", "--help"]):
    try:
        main(arguments)
    except SystemExit as ended:
        assert ended.code == 0
heavy = {"torch", "transformers", "httpx", "rich", "numpy", "pydantic", "omegaconf"}
print(json.dumps(sorted(heavy & sys.modules.keys())))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    *told, loaded = ended.stdout.splitlines()
    assert json.loads(loaded) == []
    told = "\n".join(told)
    for command in ("train", "check", "demo"):
        assert f"usage: mopd {command} " in told
    assert "train a student with its teachers" in told
    assert "RUN.YAML" in told
