"""Prompts: all valid forms of a line; invalid lines are reported by file and line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.errors import DataError, MissingPackageError
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import DataConfig
from mopd_trainer.data.prompts import read_prompts
from tests.trainer.runs import write_lines

TEACHERS = ["math", "code"]
OK = {"prompt": "?", "teacher": "math"}


def read(
    folder: Path, *lines: object, teachers: list[str] | None = None, **config: Any
) -> list[Prompt]:
    path = write_lines(folder / "data.jsonl", lines)
    return read_prompts(DataConfig(prompts=path, **config), teachers or TEACHERS)


def error_line(folder: Path, *lines: object, **config: Any) -> int:
    """Return the number of the line that is reported as invalid."""
    with pytest.raises(DataError) as caught:
        read(folder, *lines, **config)
    key = caught.value.key
    assert key is not None
    assert str(caught.value).startswith(f"{key}: ")
    assert "\n" not in str(caught.value)
    path, _, number = key.rpartition(":")
    assert path == str(folder / "data.jsonl")
    return int(number)


def turns(*roles_and_texts: str) -> list[dict[str, str]]:
    pairs = zip(roles_and_texts[::2], roles_and_texts[1::2], strict=True)
    return [{"role": role, "content": content} for role, content in pairs]


SOLVED = turns("system", "be brief", "user", "2?", "assistant", "3", "user", "4?", "assistant", "5")


def test_line_has_messages_or_a_prompt(tmp_path: Path) -> None:
    first, second = read(
        tmp_path,
        {"messages": SOLVED[:-1], "teacher": "code"},
        {"prompt": "3 + 4 =", "teacher": "math"},
    )
    assert [message.model_dump() for message in first.messages] == SOLVED[:-1]
    assert [(m.role, m.content) for m in second.messages] == [("user", "3 + 4 =")]
    assert [dict(prompt.teachers) for prompt in (first, second)] == [{"code": 1}, {"math": 1}]
    assert [first.index, second.index] == [0, 1]


def test_configured_keys_of_prompt_and_reference_answer(tmp_path: Path) -> None:
    [prompt] = read(
        tmp_path,
        {"q": "why?", "a": {"text": "because"}, "prompt": "ignored", "teacher": "math"},
        question_key="q",
        answer_key="a",
    )
    assert prompt.messages[0].content == "why?"
    assert prompt.answer is None  # the run uses rollouts
    assert prompt.metadata == {"answer": {"text": "because"}}


@pytest.mark.parametrize("config", [{"source": "answers"}, {"on_policy_fraction": 0.5}])
def test_last_assistant_message_is_the_reference_answer(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    [prompt] = read(tmp_path, {"messages": SOLVED, "teacher": "math"}, **config)
    assert [message.model_dump() for message in prompt.messages] == SOLVED[:-1]
    assert prompt.answer == "5"


@pytest.mark.parametrize(
    ("line", "config"),
    [
        ({"messages": SOLVED[:-1]}, {}),
        ({"prompt": "4?"}, {}),
        ({"q": "4?"}, {"question_key": "q"}),
    ],
)
def test_answer_key_names_the_reference_answer(
    tmp_path: Path, line: dict[str, Any], config: dict[str, Any]
) -> None:
    line = {**line, "a": "5", "teacher": "math"}
    [prompt] = read(tmp_path, line, source="answers", answer_key="a", **config)
    assert (prompt.messages[-1].content, prompt.answer) == ("4?", "5")


def test_plain_sft_ignores_teachers(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", [{"messages": SOLVED, "teacher": "unheard of"}])
    [prompt] = read_prompts(DataConfig(prompts=path, source="answers"), [])
    assert prompt.teachers == {}


@pytest.mark.parametrize(
    ("line", "answer_key"),
    [
        ({"prompt": "?"}, None),
        ({"messages": SOLVED[:-1]}, None),
        ({"messages": turns("user", "?", "assistant", "")}, None),
        ({"messages": turns("assistant", "3")}, None),
        ({"messages": turns("assistant", "3", "assistant", "5")}, None),
        ({"messages": SOLVED, "a": "6"}, "a"),
        ({"prompt": "?"}, "a"),
        ({"prompt": "?", "a": ""}, "a"),
        ({"prompt": "?", "a": 5}, "a"),
    ],
)
def test_line_without_a_reference_answer_is_invalid(
    tmp_path: Path, line: dict[str, Any], answer_key: str | None
) -> None:
    valid = {**OK, "messages": SOLVED} if answer_key is None else {**OK, "a": "5"}
    config = {"source": "answers", "answer_key": answer_key}
    assert error_line(tmp_path, valid, {**line, "teacher": "math"}, **config) == 2


@pytest.mark.parametrize(
    ("line", "config", "weights"),
    [
        ({"teacher": "code"}, {}, {"code": 1}),
        ({"data_source": "code"}, {}, {"code": 1}),
        ({"tag": "code"}, {}, {"code": 1}),
        ({"dataset": "code"}, {}, {"code": 1}),
        ({"dataset": "gsm8k", "teacher": "code"}, {}, {"code": 1}),
        ({"teacher": "unheard of", "judge": "code"}, {"teacher_key": "judge"}, {"code": 1}),
        ({"teacher": {"math": 3, "code": 1.0}}, {}, {"math": 0.75, "code": 0.25}),
        ({"teacher": "math"}, {"default_teacher": "code"}, {"math": 1}),
        ({}, {"default_teacher": "code"}, {"code": 1}),
        ({"teacher": None}, {"default_teacher": "code"}, {"code": 1}),
        ({}, {"teachers": ["only"]}, {"only": 1}),
    ],
)
def test_teachers_of_a_line(
    tmp_path: Path, line: dict[str, Any], config: dict[str, Any], weights: dict[str, float]
) -> None:
    [prompt] = read(tmp_path, {"prompt": "?", **line}, **config)
    assert prompt.teachers == weights


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "?"},
        *(
            {"prompt": "?", "teacher": teacher}
            for teacher in (
                "maths",
                {"math": 1, "x": 1},
                {"math": 0},
                {"math": float("inf")},
                {"math": 10**400},
                {"math": 1e308, "code": 1e308},  # an infinite sum
                {},
                ["math"],
            )
        ),
        *({**OK, "prompt": prompt} for prompt in (5, "", "half \ud83d")),
        {"question": "?", "teacher": "math"},
        *(
            {"messages": messages, "teacher": "math"}
            for messages in (
                [],
                "hello",
                None,
                [{"role": "user"}],
                turns("assistant", "7"),
                turns("user", "?", "assistant", "\ud83d", "user", "?"),
            )
        ),
        [1, 2],
    ],
)
def test_invalid_line_is_reported_by_file_and_line(tmp_path: Path, line: object) -> None:
    assert error_line(tmp_path, OK, OK, line) == 3


def test_configured_teacher_key_is_the_only_one(tmp_path: Path) -> None:
    assert error_line(tmp_path, {"prompt": "?", "teacher": "code"}, teacher_key="judge") == 1


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    line = json.dumps({"prompt": "line\u2028separator", "teacher": "math"}, ensure_ascii=False)
    path.write_text(f"\n{line}\n   \n{line}\n" + '{"prompt": "?", "teacher": "x"}', "utf-8")
    with pytest.raises(DataError) as caught:
        read_prompts(DataConfig(prompts=path), TEACHERS)
    assert caught.value.key == f"{path}:5"
    path.write_text(f"\n{line}\n   \n{line}", "utf-8")
    assert [p.index for p in read_prompts(DataConfig(prompts=path), TEACHERS)] == [0, 1]


@pytest.mark.parametrize(
    ("content", "suffix"),
    [
        (b'{"prompt": "?", "teacher": "math"}\n{"prompt": \n', ":2"),
        (b'{"prompt": "?", "teacher": "math"}\n{"prompt": "\xff"}\n', ":2"),
        (b'{"prompt": "?", "n": 1%s}\n' % (b"0" * 5_000), ":1"),
        (b'{"n": %s}\n' % (b"[" * 100_000), ":1"),
        (b"\n  \n", ""),
        (None, ""),
    ],
)
def test_file_that_is_not_jsonl_is_rejected(
    tmp_path: Path, content: bytes | None, suffix: str
) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_prompts(DataConfig(prompts=path), TEACHERS)
    assert caught.value.key == f"{path}{suffix}"


def test_invalid_lines_can_be_skipped_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[object] = [
        {"prompt": "1", "teacher": "math"},
        {"prompt": "2", "teacher": "history"},
        ["3"],
        {"prompt": "4", "teacher": "code"},
    ]
    prompts = read(tmp_path, *lines, on_bad_line="skip")
    contents = [(prompt.index, prompt.messages[0].content) for prompt in prompts]
    assert contents == [(0, "1"), (1, "4")]
    [message] = caplog.messages
    assert "skipped 2 invalid lines" in message
    assert "data.jsonl:2: " in message
    assert error_line(tmp_path, *lines) == 2
    with pytest.raises(DataError) as caught:
        read(tmp_path, ["3"], on_bad_line="skip")
    assert caught.value.key == str(tmp_path / "data.jsonl")


@pytest.mark.parametrize(
    ("line", "config"),
    [
        ({"functions": []}, {}),
        ({"id": 7}, {}),
        ({"id": 7, "level": 1}, {"ignored_keys": ["id"]}),
        ({"answer": "5"}, {"answer_key": "solution"}),
    ],
)
def test_key_that_nothing_reads_is_invalid(
    tmp_path: Path, line: dict[str, Any], config: dict[str, Any]
) -> None:
    assert error_line(tmp_path, OK, {**OK, **line}, **config) == 2
    assert len(read(tmp_path, OK, {**OK, **dict.fromkeys(line)}, **config)) == 2
    config["ignored_keys"] = [*line]
    assert len(read(tmp_path, OK, {**OK, **line}, **config)) == 2
    assert len(read(tmp_path, {**OK, **line}, ignored_keys="all")) == 1


def test_kept_lines_have_any_keys_but_those_of_a_template(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", [{**OK, "level": 1}, {**OK, "tools": [1]}])
    with pytest.raises(DataError) as caught:
        read_prompts(DataConfig(prompts=path), TEACHERS, keep_rows=True)
    assert caught.value.key == f"{path}:2"


@pytest.mark.parametrize(("package", "split"), [("pyarrow", None), ("datasets", "train")])
def test_missing_package_of_a_format_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, split: str | None
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("mopd_trainer.data.rows.find_spec", lambda name: None)
    path = tmp_path / "prompts.parquet"
    path.touch()
    with pytest.raises(MissingPackageError) as caught:
        read_prompts(DataConfig(prompts=path, split=split), TEACHERS)
    assert caught.value.key == package


def test_parquet_has_the_prompts_of_the_same_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = [{**OK, "prompt": str(number)} for number in range(3)] + [{"prompt": "?"}]
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(lines), path)
    config = DataConfig(prompts=path, default_teacher="code")
    expected = read(tmp_path, *lines, default_teacher="code")
    assert read_prompts(config, TEACHERS) == expected
    with pytest.raises(DataError) as caught:
        read_prompts(DataConfig(prompts=path), TEACHERS)
    assert caught.value.key == f"{path}:4"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError) as caught:
        read_prompts(config, TEACHERS)
    assert caught.value.key == str(path)


def test_dataset_has_the_prompts_of_the_same_lines(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    lines = [{**OK, "prompt": str(number)} for number in range(3)]
    (tmp_path / "held_out").mkdir()
    folder = write_lines(tmp_path / "held_out" / "a.jsonl", lines).parent
    saved = tmp_path / "saved"
    datasets.load_dataset(str(folder)).save_to_disk(str(saved))
    for path in (folder, saved):
        config = DataConfig(prompts=path, split="train")
        assert read_prompts(config, TEACHERS) == read(tmp_path, *lines)
        with pytest.raises(DataError) as caught:
            read_prompts(config.model_copy(update={"split": "test"}), TEACHERS)
        assert caught.value.key == str(path)
