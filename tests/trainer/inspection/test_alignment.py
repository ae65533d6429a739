"""``mopd align`` and ``mopd_trainer.align``: spans of two tokenizers on a text."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from mopd_losses.alignment.byte_alignment import align as align_sequences
from mopd_protocol.errors import DataError
from mopd_trainer import align
from mopd_trainer.cli.main import main
from mopd_trainer.inspection.tokenizers import readable
from tests.losses.sequences import spans
from tests.trainer.students import encoder, table
from tests.trainer.vocabularies import model_folder, serve

TEXT = "Grüße 👨‍👩‍👧 12345 + 7 =\tx\r\n的 漢字 e\u0301 [red]not a colour[/]"
SIDES = ("digit", "sentencepiece")


def facts(text: str) -> dict[str, Any]:
    return align(str(model_folder("qwen")), str(model_folder("llama")), text).facts()


def run_align(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Output of the command on a terminal of 80 columns."""
    main(["align", *map(str, (model_folder("qwen"), model_folder("llama"), *arguments))])
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("qwen", "llama"):  # saved before output is captured
        model_folder(family)
    monkeypatch.setenv("COLUMNS", "80")


def test_spans_are_those_of_training() -> None:
    result = facts(TEXT)
    left, right = (table(name).sequence(encoder(name).encode(TEXT)) for name in SIDES)
    expected = align_sequences(left, right)
    chunks = [(*chunk["student_tokens"], *chunk["teacher_tokens"]) for chunk in result["chunks"]]
    assert chunks == spans(expected)
    assert all(chunk["in_span"] for chunk in result["chunks"])
    assert result["student"]["token_ids"] == left.token_ids.tolist()
    assert result["teacher"]["byte_ends"] == right.byte_ends.tolist()
    assert result["bytes"] == result["aligned_bytes"] == len(TEXT.encode())
    assert (result["aligned_share"], result["same_text"]) == (1, True)
    assert result["spans"] == len(expected)
    assert result["one_to_one_spans"] == int(expected.one_to_one.sum()) < result["spans"]
    for side in ("student", "teacher"):
        pieces = [piece for chunk in result["chunks"] for piece in chunk[f"{side}_pieces"]]
        assert len(pieces) == len(result[side]["token_ids"])


@pytest.mark.parametrize("text", ["before the ▁ and after all of it", "before ▁"])
def test_differing_text_is_in_no_span(text: str) -> None:
    result = facts(text)
    (unaligned,) = [chunk for chunk in result["chunks"] if not chunk["in_span"]]
    assert "\\xe2" in "".join(unaligned["student_pieces"])
    assert "␣" in unaligned["teacher_pieces"][0]
    assert result["same_text"] is False
    assert result["aligned_bytes"] < result["bytes"]
    for side in ("student", "teacher"):  # every token once, in order
        tokens = [n for chunk in result["chunks"] for n in range(*chunk[f"{side}_tokens"])]
        assert tokens == [*range(len(result[side]["token_ids"]))]


def test_empty_text_has_no_spans(capsys: pytest.CaptureFixture[str]) -> None:
    result = facts("")
    assert (result["spans"], result["chunks"], result["aligned_share"]) == (0, [], 1)
    assert "0 tokens" in run_align(capsys, "--text", "")


def test_pieces_are_printed_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    output = run_align(capsys, "--text", TEXT)
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["byte", "student", "teacher", "tokens"]
    assert lines[1].split() == ["0", "Gr", "G", "r", "1-2"]
    size = len(TEXT.encode())
    assert f"{size} of {size} bytes (100.00%)" in output
    assert "\x1b" not in output


def test_text_is_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    output = run_align(capsys, "--text", "[red]x[/]")
    assert output.splitlines()[1].count("[ re d ] x [ / ]") == 2


def test_long_texts_are_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    text = "Grüße 12 " * 50
    few = run_align(capsys, "--text", text, "--rows", "5")
    every = run_align(capsys, "--text", text, "--rows", "0")
    left = len(every.splitlines()) - len(few.splitlines()) + 1
    assert f"… {left} more lines; --rows 0 shows all" in " ".join(few.split())
    assert "more lines" not in every
    assert few.splitlines()[-4:] == every.splitlines()[-4:]


def test_tokenizer_of_a_running_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    url = serve("llama", monkeypatch)
    result = align(str(model_folder("qwen")), url, TEXT).facts()
    assert result["teacher"]["name"] == url
    assert result["chunks"] == facts(TEXT)["chunks"]


def test_file_and_standard_input_are_read_byte_for_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    from_file = json.loads(run_align(capsys, "--file", path, "--json"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode()), newline=None))
    from_stdin = json.loads(run_align(capsys, "--file", "-", "--json"))
    assert from_file == from_stdin == json.loads(json.dumps(facts(TEXT)))


@pytest.mark.parametrize(
    "create",
    [
        lambda path: path.write_bytes(b"abcd\xff"),
        lambda path: path.mkdir(),
        lambda path: None,
    ],
)
def test_unreadable_file_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], create: Any
) -> None:
    path = tmp_path / "text.txt"
    create(path)
    with pytest.raises(SystemExit) as caught:
        main(["align", "a", "b", "--file", str(path)])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"mopd: {path}: ")


def test_text_without_utf8_encoding_is_rejected() -> None:
    """A shell may pass any bytes, which Python decodes to surrogates."""
    with pytest.raises(DataError) as caught:
        align("a", "b", "x\udcff")
    assert caught.value.key == "text"


@pytest.mark.parametrize(
    ("spelling", "visible"),
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
def test_different_bytes_look_different(spelling: bytes, visible: str) -> None:
    assert readable(spelling) == visible
