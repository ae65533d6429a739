"""``mopd align``: spans of two tokenizers side by side."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from mopd_losses.alignment.byte_alignment import align
from mopd_trainer.cli.main import main
from mopd_trainer.cli.readable_bytes import readable
from tests.losses.sequences import spans
from tests.trainer.students import encoder, table
from tests.trainer.vocabularies import model_folder, serve

TEXT = "Grüße 👨‍👩‍👧 12345 + 7 =\tx\r\n的 漢字 e\u0301 [red]not a colour[/]"
SIDES = ("digit", "sentencepiece")


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    main(["align", *map(str, arguments)])
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def aligned(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    folders = (model_folder("qwen"), model_folder("llama"))
    return json.loads(told(capsys, *folders, *arguments, "--json"))


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("qwen", "llama"):  # saved before anybody listens to what is printed
        model_folder(family)
    monkeypatch.setenv("COLUMNS", "80")


def test_the_spans_are_those_that_training_uses(capsys: pytest.CaptureFixture[str]) -> None:
    found = aligned(capsys, "--text", TEXT)
    left, right = (table(name).sequence(encoder(name).encode(TEXT)) for name in SIDES)
    expected = align(left, right)
    stretches = [
        (*stretch["student_tokens"], *stretch["teacher_tokens"]) for stretch in found["stretches"]
    ]
    assert stretches == spans(expected)
    assert all(stretch["in_span"] for stretch in found["stretches"])
    assert found["student"]["token_ids"] == left.token_ids.tolist()
    assert found["teacher"]["byte_ends"] == right.byte_ends.tolist()
    assert found["bytes"] == found["aligned_bytes"] == len(TEXT.encode())
    assert (found["aligned_share"], found["same_text"]) == (1, True)
    assert found["spans"] == len(expected)
    assert found["one_to_one_spans"] == int(expected.one_to_one.sum()) < found["spans"]
    for side in ("student", "teacher"):
        pieces = [piece for stretch in found["stretches"] for piece in stretch[f"{side}_pieces"]]
        assert len(pieces) == len(found[side]["token_ids"])


def test_what_differs_belongs_to_no_span(capsys: pytest.CaptureFixture[str]) -> None:
    found = aligned(capsys, "--text", "before the ▁ and after all of it")
    apart = [stretch for stretch in found["stretches"] if not stretch["in_span"]]
    assert len(apart) == 1
    assert "\\xe2" in "".join(apart[0]["student_pieces"])
    assert apart[0]["teacher_pieces"] == ["␣␣"]
    assert found["same_text"] is False
    assert found["aligned_bytes"] < found["bytes"]
    covered = {"student": 0, "teacher": 0}
    for stretch in found["stretches"]:  # every token once, in order
        for side in covered:
            start, covered[side] = covered[side], stretch[f"{side}_tokens"][1]
            assert stretch[f"{side}_tokens"][0] == start
    assert covered == {side: len(found[side]["token_ids"]) for side in covered}


def test_a_trailing_difference_is_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = aligned(capsys, "--text", "before ▁")
    assert found["stretches"][-1]["in_span"] is False
    assert found["stretches"][-1]["student_tokens"][1] == len(found["student"]["token_ids"])


def test_a_reader_sees_pieces_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, model_folder("qwen"), model_folder("llama"), "--text", TEXT)
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["byte", "student", "teacher", "tokens"]
    assert lines[1].split() == ["0", "Gr", "G", "r", "1-2"]
    assert f"{len(TEXT.encode())} of {len(TEXT.encode())} bytes (100.00%)" in said
    assert "\x1b" not in said


def test_a_text_is_never_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, model_folder("qwen"), model_folder("llama"), "--text", "[red]x[/]")
    assert said.splitlines()[1].count("[ re d ] x [ / ]") == 2


def test_long_texts_are_cut_short_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    folders = (model_folder("qwen"), model_folder("llama"))
    text = "Grüße 12 " * 50
    few = told(capsys, *folders, "--text", text, "--rows", "5")
    every = told(capsys, *folders, "--text", text, "--rows", "0")
    left = len(every.splitlines()) - len(few.splitlines()) + 1
    assert f"… {left} more lines; --rows 0 shows all" in " ".join(few.split())
    assert "more lines" not in every
    assert few.splitlines()[-4:] == every.splitlines()[-4:]


def test_a_running_teacher_is_asked_for_its_tokenizer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = serve("llama", monkeypatch)
    found = json.loads(told(capsys, model_folder("qwen"), url, "--text", TEXT, "--json"))
    assert found["teacher"]["name"] == url
    assert found["stretches"] == aligned(capsys, "--text", TEXT)["stretches"]


def test_a_file_and_standard_input_are_read_byte_for_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    from_file = aligned(capsys, "--file", path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode()), newline=None))
    from_stdin = aligned(capsys, "--file", "-")
    assert from_file == from_stdin == aligned(capsys, "--text", TEXT)


def test_no_text_has_no_spans(capsys: pytest.CaptureFixture[str]) -> None:
    found = aligned(capsys, "--text", "")
    assert (found["spans"], found["stretches"], found["aligned_share"]) == (0, [], 1)
    said = told(capsys, model_folder("qwen"), model_folder("llama"), "--text", "")
    assert "0 tokens" in said


@pytest.mark.parametrize(
    ("arrange", "sentence"),
    [
        (lambda path: path.write_bytes(b"abcd\xff"), "is not UTF-8: invalid start byte at byte 4"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_is_no_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arrange: Any, sentence: str
) -> None:
    path = tmp_path / "text.txt"
    arrange(path)
    with pytest.raises(SystemExit) as ended:
        main(["align", "a", "b", "--file", str(path)])
    assert (ended.value.code, capsys.readouterr().err) == (2, f"mopd: {path} {sentence}\n")


def test_an_argument_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell may pass any bytes, and Python makes half characters of them."""
    with pytest.raises(SystemExit) as ended:
        main(["align", "a", "b", "--text", "x\udcff"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("mopd: --text is not UTF-8; give it as a file")


@pytest.mark.parametrize(
    ("spelled", "shown"),
    [
        (b" a b", "␣a␣b"),
        (b"\r\n\t\x00", "\\r\\n\\t\\x00"),
        ("漢".encode()[:2], "\\xe6\\xbc"),
        (b"x\xff", "x\\xff"),
        ("e\u0301".encode(), "e\u0301"),
        ("\u0301e".encode(), "\\u0301e"),
        ("👨\u200d👩".encode(), "👨\\u200d👩"),
        (b"\\x41", "\\\\x41"),
        ("␣".encode(), "\\u2423"),
        ("\u00a0\u3000".encode(), "\\xa0\\u3000"),
        (b"", ""),
    ],
)
def test_bytes_are_shown_so_that_no_two_look_alike(spelled: bytes, shown: str) -> None:
    assert readable(spelled) == shown
