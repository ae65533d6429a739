"""``mopd projection``: the saved matrix, the facts about it, and invalid arguments."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from mopd_losses.config import ProjectionSettings
from mopd_losses.projection.cache import ProjectionCache
from mopd_losses.projection.matrix import ProjectionMatrix, build_projection
from mopd_protocol.errors import ConfigError, DataError, TeacherError, TokenizerError
from mopd_trainer.cli.main import main
from mopd_trainer.config.run import StudentConfig
from mopd_trainer.inspection.tokenizers import load_tokenizer
from mopd_trainer.student.identity import StudentIdentity
from tests.trainer.students import encoder, table
from tests.trainer.vocabularies import model_folder, serve, tokenizer_file


def projection(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Output of ``mopd projection`` on a terminal of 80 columns."""
    main(["projection", *map(str, arguments)])
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    return json.loads(projection(capsys, "inspect", *arguments, "--json"))


def both() -> tuple[Path, Path]:
    return model_folder("qwen"), model_folder("llama")


def student_identity() -> StudentIdentity:
    return StudentIdentity.read(StudentConfig(model=str(model_folder("qwen"))))


def expected(settings: ProjectionSettings | None = None) -> ProjectionMatrix:
    return build_projection(
        table("digit"),
        table("sentencepiece"),
        encoder("sentencepiece"),
        student_width=student_identity().logit_width,
        settings=settings,
    )


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    both()  # saved before output is captured
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("weights", ["first", "decay"])
def test_saved_projection_is_the_one_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: str
) -> None:
    path = tmp_path / "p.safetensors"
    output = projection(capsys, "build", *both(), "--output", path, "--weights", weights)
    settings = ProjectionSettings.model_validate({"weights": weights})
    assert ProjectionMatrix.load(path).key == expected(settings).key
    assert ProjectionMatrix.load(path).settings == settings
    assert f"{path.stat().st_size:,} bytes" in output
    width = json.loads((model_folder("qwen") / "config.json").read_text())["vocab_size"]
    assert ProjectionMatrix.load(path).student_width == width > table("digit").size
    assert f"head of {width} rows" in output


def test_running_teachers_provide_tokenizer_and_width(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, path = serve("llama", monkeypatch), tmp_path / "p.safetensors"
    projection(capsys, "build", model_folder("qwen"), url, "--output", path)
    assert ProjectionMatrix.load(path).key == expected().key
    projection(capsys, "build", url, model_folder("qwen"), "--output", path)
    width = json.loads((model_folder("llama") / "config.json").read_text())["vocab_size"]
    assert ProjectionMatrix.load(path).student_width == width > table("sentencepiece").size


def test_run_finds_a_projection_in_its_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    projection(capsys, "build", *both(), "--output", folder)
    (built,) = folder.iterdir()
    before = built.stat().st_mtime_ns

    def must_not_build(*arguments: object, **settings: object) -> None:
        raise AssertionError("the projection exists")

    monkeypatch.setattr("mopd_losses.projection.cache.build_projection", must_not_build)
    identity = student_identity()
    cached = ProjectionCache(folder).matrix(
        identity.table,
        table("sentencepiece"),
        encoder("sentencepiece"),
        student_width=identity.logit_width,
    )
    assert cached.key == expected().key
    assert built.stat().st_mtime_ns == before


def test_default_output_is_the_current_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    projection(capsys, "build", *both())
    (path,) = tmp_path.iterdir()
    assert ProjectionMatrix.load(path).key == expected().key


def test_numbers_are_those_of_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    facts = inspect(capsys, *both(), "--weights", "decay")
    dense = expected(ProjectionSettings(weights="decay")).dense() > 0
    student, teacher = table("digit"), table("sentencepiece")
    per_row, per_column = dense.sum(axis=1), dense.sum(axis=0)
    assert facts["student_ids"] == student.size
    assert facts["projected"] == (per_row > 0).sum()
    assert facts["one_hot"] == (per_row == 1).sum()
    assert facts["spread"] == (per_row > 1).sum() > 0
    assert facts["unprojected_ids"] == np.flatnonzero(per_row[: student.size] == 0).tolist()
    assert facts["unprojected"] == len(facts["unprojected_ids"])
    assert facts["teacher_ids"] == teacher.size
    assert facts["reached"] == (per_column > 0).sum()
    assert facts["unsupported_ids"] == np.flatnonzero(per_column == 0).tolist()
    assert facts["fed_by_several"] == (per_column > 1).sum()
    assert facts["most_fed_by"] == per_column.max() == per_column[facts["most_fed_id"]]
    assert facts["entries"] == dense.sum()
    tokens, known = facts["tokenizers"], {*teacher.all_bytes}
    texts = [piece for piece in student.all_bytes if piece]
    assert tokens["text_ids"] == len(texts)
    assert tokens["same_bytes"] == sum(piece in known for piece in texts)
    assert (tokens["controls"], tokens["controls_projected"]) == (5, 4)
    assert tokens["unsupported_text"] == sum(
        bool(teacher.all_bytes[token]) for token in facts["unsupported_ids"]
    )
    assert tokens["unprojected"] == ["<|pad|>"]
    assert tokens["unsupported_controls"] == ["<unk>", "<s>"]


def test_roles_of_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = inspect(capsys, *both())
    roles = {role.pop("role"): role for role in facts["tokenizers"]["roles"]}
    ends = {"student": "<|end|>", "teacher": "</s>", "target": "</s>"}
    assert roles == {
        "bos": {"student": None, "teacher": "<s>", "target": None},
        "eos": ends,
        "end of turn": ends,
        "pad": {"student": "<|pad|>", "teacher": None, "target": None},
    }
    files = (tokenizer_file("qwen", tmp_path), tokenizer_file("llama", tmp_path))
    facts = inspect(capsys, *files)  # without tokenizer_config.json
    assert facts["tokenizers"]["roles"] == []
    assert facts["tokenizers"]["controls_projected"] == 3  # controls with equal names
    assert facts["student_ids"] == table("digit").size
    facts = inspect(capsys, model_folder("qwen") / "tokenizer.json", files[1])
    assert {role["role"]: role["student"] for role in facts["tokenizers"]["roles"]} == {
        "eos": "<|end|>",
        "end of turn": "<|end|>",
        "pad": "<|pad|>",
    }


@pytest.mark.parametrize("weights", ["first", "decay"])
def test_worst_rows(capsys: pytest.CaptureFixture[str], weights: str) -> None:
    facts = inspect(capsys, *both(), "--rows", "1000", "--weights", weights)
    student, teacher = table("digit"), table("sentencepiece")
    known, worst = {*teacher.all_bytes}, facts["tokenizers"]["worst"]
    assert {row["student_id"] for row in worst} == {
        token for token, piece in enumerate(student.all_bytes) if piece and piece not in known
    }
    for row in worst:
        piece = student.bytes_of(row["student_id"])
        entry_weights = [weight for _, _, weight in row["targets"]]
        assert entry_weights == sorted(entry_weights, reverse=True)
        assert sum(entry_weights) == pytest.approx(1)
        first = teacher.bytes_of(row["targets"][0][0])
        assert piece.startswith(first)
        assert row["first_share"] == len(first) / len(piece)
    assert any(len(row["targets"]) > 1 for row in worst) == (weights == "decay")
    assert [row["first_share"] for row in worst] == sorted(row["first_share"] for row in worst)
    fewer = inspect(capsys, *both(), "--rows", "3", "--weights", weights)
    assert fewer["tokenizers"]["worst"] == worst[:3]


def test_output_is_readable_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    output = projection(capsys, "inspect", *both())
    assert max(map(len, output.splitlines())) <= 80
    for part in ("␣apple", "\\x", "tokens without a target\n<|pad|>\n"):
        assert part in output
    assert "\ufffd" not in output


def test_file_without_tokenizers_has_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.safetensors"
    projection(capsys, "build", *both(), "--output", path)
    file, complete = inspect(capsys, path), inspect(capsys, path, *both())
    assert file["tokenizers"] is None
    assert complete == inspect(capsys, *both())
    assert {**complete, "tokenizers": None} == file
    assert "FILE STUDENT TEACHER" in " ".join(projection(capsys, "inspect", path).split())


def test_invalid_arguments_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student, teacher = both()
    built, text = tmp_path / "p.safetensors", tmp_path / "notes.txt"
    projection(capsys, "build", student, teacher, "--output", built)
    text.write_text("no tokenizer")
    for arguments, part in (
        (("build", student, teacher, "--output", text / "x"), "notes.txt"),
        (("inspect", text), "notes.txt"),
        (("inspect", tmp_path / "none"), "none"),
        (("inspect", built, teacher), "FILE STUDENT TEACHER"),
        (("inspect", built, student, student), "tokenizer"),
        (("inspect", built, student, teacher, teacher), "FILE STUDENT TEACHER"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["projection", *map(str, arguments)])
        captured = capsys.readouterr()
        assert (caught.value.code, captured.out) == (2, "")
        assert captured.err.startswith("mopd: ")
        assert part in captured.err
        assert captured.err.count("\n") == 1


def test_invalid_tokenizers_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mopd_trainer.inspection.tokenizers._DEADLINE_SECONDS", 0.05)
    text, empty, words = (tmp_path / name for name in ("notes.txt", "empty", "words.json"))
    text.write_text("no tokenizer")
    Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")).save(str(words))
    empty.mkdir()
    for name, kind, key in (
        (str(tmp_path / "missing"), ConfigError, str(tmp_path / "missing")),
        ("missing.json", ConfigError, "missing.json"),
        (str(text), TokenizerError, str(text)),
        (str(words), TokenizerError, str(words)),
        (str(empty), ConfigError, str(empty)),
        ("http://", ConfigError, "url"),
        ("http://127.0.0.1:9", TeacherError, None),
    ):
        with pytest.raises(kind) as caught:
            load_tokenizer(name)
        assert caught.value.key == key
    with pytest.raises(ConfigError) as caught:
        load_tokenizer("http://t", api_key_env="NO_KEY")
    assert caught.value.key == "NO_KEY"


def test_model_with_too_narrow_a_head_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "narrow"
    folder.mkdir()
    for file in model_folder("qwen").iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    with pytest.raises(DataError, match="100"):
        load_tokenizer(str(folder))
