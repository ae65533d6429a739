"""``mopd projection``: what it writes, what it says, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_losses.config import ProjectionSettings
from mopd_losses.projection.cache import ProjectionCache
from mopd_losses.projection.matrix import ProjectionMatrix, build_projection
from mopd_trainer.cli.main import main
from mopd_trainer.config.run import StudentConfig
from mopd_trainer.student.identity import StudentIdentity
from tests.trainer.students import encoder, table
from tests.trainer.vocabularies import model_folder, serve, tokenizer_file


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command prints, as on a terminal of 80 columns."""
    main(["projection", *map(str, arguments)])
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def inspected(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    return json.loads(told(capsys, "inspect", *arguments, "--json"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["projection", *map(str, arguments)])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert printed.err.startswith("mopd: ")
    assert printed.err.count("\n") == 1
    return printed.err


def expected(settings: ProjectionSettings | None = None) -> ProjectionMatrix:
    return build_projection(
        table("digit"),
        table("sentencepiece"),
        encoder("sentencepiece"),
        student_width=StudentIdentity.read(
            StudentConfig(model=str(model_folder("qwen")))
        ).logit_width,
        settings=settings,
    )


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("qwen", "llama"):  # saved before anybody listens to what is printed
        model_folder(family)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("weights", ["first", "decay"])
def test_the_projection_of_two_model_folders_is_the_one_that_training_builds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: str
) -> None:
    path = tmp_path / "p.safetensors"
    folders = (model_folder("qwen"), model_folder("llama"))
    said = told(capsys, "build", *folders, "--output", path, "--weights", weights)
    settings = ProjectionSettings.model_validate({"weights": weights})
    assert ProjectionMatrix.load(path).key == expected(settings).key
    assert ProjectionMatrix.load(path).settings == settings
    assert "written to" in said
    assert f"{path.stat().st_size:,} bytes" in said


def test_a_running_teacher_is_asked_for_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = serve("llama", monkeypatch)
    path = tmp_path / "p.safetensors"
    told(capsys, "build", model_folder("qwen"), url, "--output", path)
    assert ProjectionMatrix.load(path).key == expected().key


def test_a_running_teacher_says_how_wide_its_head_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.safetensors"
    told(capsys, "build", serve("llama", monkeypatch), model_folder("qwen"), "--output", path)
    width = json.loads((model_folder("llama") / "config.json").read_text())["vocab_size"]
    assert ProjectionMatrix.load(path).student_width == width > table("sentencepiece").size


def test_a_run_finds_what_was_built_into_its_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    told(capsys, "build", model_folder("qwen"), serve("llama", monkeypatch), "--output", folder)
    (built,) = folder.iterdir()
    before = built.stat().st_mtime_ns

    def must_not_build(*arguments: object, **settings: object) -> None:
        raise AssertionError("it was built already")

    monkeypatch.setattr("mopd_losses.projection.cache.build_projection", must_not_build)
    identity = StudentIdentity.read(StudentConfig(model=str(model_folder("qwen"))))
    found = ProjectionCache(folder).matrix(
        identity.table,
        table("sentencepiece"),
        encoder("sentencepiece"),
        student_width=identity.logit_width,
    )
    assert found.key == expected().key
    assert built.stat().st_mtime_ns == before


def test_without_an_output_the_file_is_written_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told(capsys, "build", model_folder("qwen"), model_folder("llama"))
    (written,) = tmp_path.iterdir()
    assert ProjectionMatrix.load(written).key == expected().key


def test_the_numbers_are_those_of_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, model_folder("qwen"), model_folder("llama"), "--weights", "decay")
    dense = expected(ProjectionSettings(weights="decay")).dense() > 0
    student, teacher = table("digit"), table("sentencepiece")
    per_row, per_column = dense.sum(axis=1), dense.sum(axis=0)
    assert found["student_ids"] == student.size
    assert found["projected"] == (per_row > 0).sum()
    assert found["one_hot"] == (per_row == 1).sum()
    assert found["spread"] == (per_row > 1).sum() > 0
    assert found["unprojected_ids"] == np.flatnonzero(per_row[: student.size] == 0).tolist()
    assert found["unprojected"] == len(found["unprojected_ids"])
    assert found["teacher_ids"] == teacher.size
    assert found["reached"] == (per_column > 0).sum()
    assert found["unsupported_ids"] == np.flatnonzero(per_column == 0).tolist()
    assert found["fed_by_several"] == (per_column > 1).sum()
    assert found["most_fed_by"] == per_column.max() == per_column[found["most_fed_id"]]
    assert found["entries"] == dense.sum()
    spelled = found["tokenizers"]
    known = {*teacher.all_bytes}
    texts = [piece for piece in student.all_bytes if piece]
    assert spelled["text_ids"] == len(texts)
    assert spelled["same_bytes"] == sum(piece in known for piece in texts)
    assert (spelled["controls"], spelled["controls_projected"]) == (5, 4)
    assert spelled["unsupported_text"] == sum(
        bool(teacher.all_bytes[token]) for token in found["unsupported_ids"]
    )
    assert spelled["unprojected"] == ["<|pad|>"]
    assert spelled["unsupported_controls"] == ["<unk>", "<s>"]


def test_roles_say_who_ends_an_answer_on_either_side(capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, model_folder("qwen"), model_folder("llama"))
    roles = {role.pop("role"): role for role in found["tokenizers"]["roles"]}
    ends = {"student": "<|end|>", "teacher": "</s>", "target": "</s>"}
    assert roles == {
        "bos": {"student": None, "teacher": "<s>", "target": None},
        "eos": ends,
        "end of turn": ends,
        "pad": {"student": "<|pad|>", "teacher": None, "target": None},
    }


def test_the_worst_rows_keep_least_of_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, model_folder("qwen"), model_folder("llama"), "--rows", "1000")
    student, teacher = table("digit"), table("sentencepiece")
    known = {*teacher.all_bytes}
    worst = found["tokenizers"]["worst"]
    assert {row["student_id"] for row in worst} == {
        token for token, piece in enumerate(student.all_bytes) if piece and piece not in known
    }
    for row in worst:
        ((target, _, weight),) = row["targets"]
        share = len(teacher.bytes_of(target)) / len(student.bytes_of(row["student_id"]))
        assert (row["first_share"], weight) == (share, 1)
    assert [row["first_share"] for row in worst] == sorted(row["first_share"] for row in worst)
    fewer = inspected(capsys, model_folder("qwen"), model_folder("llama"), "--rows", "3")
    assert fewer["tokenizers"]["worst"] == worst[:3]


def test_pieces_of_a_row_stand_in_the_order_of_their_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = (model_folder("qwen"), model_folder("llama"))
    found = inspected(capsys, *folders, "--weights", "decay", "--rows", "1000")
    student, teacher = table("digit"), table("sentencepiece")
    worst = found["tokenizers"]["worst"]
    for row in worst:
        weights = [weight for _, _, weight in row["targets"]]
        assert weights == sorted(weights, reverse=True)
        assert sum(weights) == pytest.approx(1)
        first = teacher.bytes_of(row["targets"][0][0])
        assert student.bytes_of(row["student_id"]).startswith(first)
        assert row["first_share"] == len(first) / len(student.bytes_of(row["student_id"]))
    assert any(len(row["targets"]) > 1 for row in worst)


def test_bytes_are_readable_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "inspect", model_folder("qwen"), model_folder("llama"))
    assert max(map(len, said.splitlines())) <= 80
    assert "␣apple" in said
    assert "\\x" in said
    assert "\ufffd" not in said
    assert "tokens without a target\n<|pad|>\n" in said
    assert "\n        pad" not in said


def test_a_file_alone_gives_numbers_and_with_its_tokenizers_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.safetensors"
    folders = (model_folder("qwen"), model_folder("llama"))
    told(capsys, "build", *folders, "--output", path)
    alone, together = inspected(capsys, path), inspected(capsys, path, *folders)
    assert alone["tokenizers"] is None
    assert together == inspected(capsys, *folders)
    assert {**together, "tokenizers": None} == alone
    assert "FILE STUDENT TEACHER" in " ".join(told(capsys, "inspect", path).split())


def test_a_bare_tokenizer_file_has_no_roles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = (tokenizer_file("qwen", tmp_path), tokenizer_file("llama", tmp_path))
    found = inspected(capsys, *files)
    assert found["tokenizers"]["roles"] == []
    assert found["tokenizers"]["controls_projected"] == 3  # the roles' names are the same
    assert found["student_ids"] == table("digit").size
    beside = inspected(capsys, model_folder("qwen") / "tokenizer.json", files[1])
    assert {role["role"]: role["student"] for role in beside["tokenizers"]["roles"]} == {
        "eos": "<|end|>",
        "end of turn": "<|end|>",
        "pad": "<|pad|>",
    }


def test_the_head_is_as_wide_as_the_model_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.safetensors"
    said = told(capsys, "build", model_folder("qwen"), model_folder("qwen"), "--output", path)
    width = json.loads((model_folder("qwen") / "config.json").read_text())["vocab_size"]
    assert ProjectionMatrix.load(path).student_width == width > table("digit").size
    assert f"head of {width} rows" in said


def test_what_cannot_work_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = model_folder("qwen"), model_folder("llama")
    built = tmp_path / "p.safetensors"
    told(capsys, "build", student, teacher, "--output", built)
    text = tmp_path / "notes.txt"
    text.write_text("no tokenizer")
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, sentence in (
        (("build", student, tmp_path / "nobody"), "nobody: no such file or folder; expected"),
        (("build", student, "missing.json"), "missing.json: no such file or folder"),
        (("build", student, text), "notes.txt is not a fast tokenizer's JSON: "),
        (("build", empty, teacher), "empty holds no tokenizer; expected tokenizer.json or"),
        (("build", student, teacher, "--output", text / "x"), "cannot be written: "),
        (("inspect", text), "notes.txt is not a projection file: "),
        (("inspect", tmp_path / "none"), "none is not a projection file: "),
        (("inspect", built, teacher), "with one tokenizer; expected both after it, or none"),
        (("inspect", built, student, student), "was built for teacher tokenizer"),
        (("inspect", built, student, teacher, teacher), "4 things to inspect; expected FILE"),
        (("build", student, "http://t", "--api-key-env", "NO_KEY"), "NO_KEY, which is not set"),
        (("build", student, "http://"), "expected http://host:port"),
        (("build", student, "http://127.0.0.1:9"), "'http://127.0.0.1:9' is unreachable: "),
    ):
        monkeypatch.setattr("mopd_trainer.cli.tokenizer_argument._DEADLINE_SECONDS", 0.05)
        assert sentence in refused(capsys, *arguments)


def test_a_model_with_too_narrow_a_head_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "narrow"
    folder.mkdir()
    for file in model_folder("qwen").iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    assert "a head of 100 rows cannot serve a tokenizer of 420 ids" in refused(
        capsys, "build", folder, model_folder("llama")
    )
