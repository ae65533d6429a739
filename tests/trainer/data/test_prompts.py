"""Prompts: every way to write a line, and every way to write it wrongly."""

import json
from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import DataConfig
from mopd_trainer.data.prompts import read_prompts
from tests.trainer.runs import write_lines

TEACHERS = ["math", "code"]


def read(
    folder: Path, *lines: object, teachers: list[str] | None = None, **config: Any
) -> list[Prompt]:
    path = write_lines(folder / "data.jsonl", lines)
    return read_prompts(DataConfig(prompts=path, **config), teachers or TEACHERS)


def refusal(folder: Path, *lines: object, **config: Any) -> str:
    with pytest.raises(DataError) as told:
        read(folder, *lines, **config)
    sentence = str(told.value)
    assert "\n" not in sentence
    return sentence.replace(str(folder), "…")


def test_a_question_is_messages_or_a_prompt(tmp_path: Path) -> None:
    conversation = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "and then?"},
    ]
    first, second = read(
        tmp_path,
        {"messages": conversation, "teacher": "code"},
        {"prompt": "3 + 4 =", "teacher": "math"},
    )
    assert [message.model_dump() for message in first.messages] == conversation
    assert [(m.role, m.content) for m in second.messages] == [("user", "3 + 4 =")]
    assert [dict(prompt.teachers) for prompt in (first, second)] == [{"code": 1}, {"math": 1}]
    assert [first.index, second.index] == [0, 1]


def test_chosen_keys_hold_question_and_answer(tmp_path: Path) -> None:
    [prompt] = read(
        tmp_path,
        {"q": "why?", "a": {"text": "because"}, "prompt": "ignored", "teacher": "math"},
        question_key="q",
        answer_key="a",
    )
    assert prompt.messages[0].content == "why?"
    assert prompt.metadata == {"answer": {"text": "because"}}


def turns(*roles_and_texts: str) -> list[dict[str, str]]:
    """A conversation of alternating roles and texts."""
    pairs = zip(roles_and_texts[::2], roles_and_texts[1::2], strict=True)
    return [{"role": role, "content": content} for role, content in pairs]


SOLVED = turns("system", "be brief", "user", "2?", "assistant", "3", "user", "4?", "assistant", "5")


@pytest.mark.parametrize("config", [{"source": "answers"}, {"on_policy_fraction": 0.5}])
def test_the_last_assistant_turn_is_the_answer(tmp_path: Path, config: dict[str, Any]) -> None:
    [prompt] = read(tmp_path, {"messages": SOLVED, "teacher": "math"}, **config)
    assert [message.model_dump() for message in prompt.messages] == SOLVED[:-1]
    assert prompt.answer == "5"


def test_an_answer_key_holds_the_answer_of_any_question(tmp_path: Path) -> None:
    config = {"source": "answers", "answer_key": "a"}
    lines = [
        {"messages": SOLVED[:-1], "a": "5", "teacher": "math"},
        {"prompt": "4?", "a": "5", "teacher": "math"},
    ]
    first, second = read(tmp_path, *lines, **config)
    assert (len(first.messages), first.answer) == (4, "5")
    assert (second.messages[0].content, second.answer) == ("4?", "5")
    line = {"q": "4?", "a": "5", "teacher": "math"}
    [third] = read(tmp_path, line, question_key="q", **config)
    assert (third.messages[0].content, third.answer) == ("4?", "5")


def test_a_run_on_rollouts_alone_has_no_answers(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"prompt": "4?", "a": 5, "teacher": "math"}, answer_key="a")
    assert prompt.answer is None
    assert prompt.metadata == {"answer": 5}


def test_where_nobody_judges_lines_need_name_nobody(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", [{"messages": SOLVED, "teacher": "unheard of"}])
    [prompt] = read_prompts(DataConfig(prompts=path, source="answers"), [])
    assert prompt.teachers == {}


@pytest.mark.parametrize(
    ("line", "answer_key", "sentence"),
    [
        ({"prompt": "?"}, None, "no reference answer (the last turn is of role 'user' and has 1 c"),
        ({"messages": SOLVED[:-1]}, None, "no reference answer (the last turn is of role 'user'"),
        (
            {"messages": turns("user", "?", "assistant", "")},
            None,
            "no reference answer (the last turn is of role 'assistant' and has 0 characters); "
            "expected 'messages' that end with an assistant turn, or set data.answer_key",
        ),
        (
            {"messages": turns("assistant", "3")},
            None,
            "'messages' holds an answer and no question; expected a turn that the student can",
        ),
        (
            {"messages": turns("assistant", "3", "assistant", "5")},
            None,
            "'messages' ends with an assistant turn; expected a turn that the student can answer",
        ),
        (
            {"messages": SOLVED, "a": "6"},
            "a",
            "'messages' ends with an assistant turn; expected a turn that the student can answer",
        ),
        ({"prompt": "?"}, "a", "'a' is None; expected text"),
        ({"prompt": "?", "a": ""}, "a", "'a' is ''; expected text"),
        ({"prompt": "?", "a": 5}, "a", "'a' is 5; expected text"),
    ],
)
def test_a_line_without_an_answer_is_named_where_answers_are_learnt(
    tmp_path: Path, line: dict[str, Any], answer_key: str | None, sentence: str
) -> None:
    lines = [{**OK, "messages": SOLVED, "a": "5"}] if answer_key is None else []
    config = {"source": "answers", "answer_key": answer_key}
    told = refusal(tmp_path, *lines, {**line, "teacher": "math"}, **config)
    assert told.startswith(f"…/data.jsonl:{len(lines) + 1}: ")
    assert sentence in told


@pytest.mark.parametrize("key", ["teacher", "data_source", "tag", "dataset"])
def test_a_teacher_may_stand_under_several_names(tmp_path: Path, key: str) -> None:
    [prompt] = read(tmp_path, {"prompt": "?", key: "code"})
    assert prompt.teachers == {"code": 1}


def test_the_first_alias_that_a_line_has_names_its_teacher(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"prompt": "?", "dataset": "gsm8k", "teacher": "code"})
    assert prompt.teachers == {"code": 1}


def test_a_chosen_key_is_the_only_one_that_names_teachers(tmp_path: Path) -> None:
    line = {"prompt": "?", "teacher": "unheard of", "judge": "code"}
    assert read(tmp_path, line, teacher_key="judge")[0].teachers == {"code": 1}
    told = refusal(tmp_path, {"prompt": "?", "teacher": "code"}, teacher_key="judge")
    assert told.startswith("…/data.jsonl:1: no 'judge'; known teachers are code, math")


def test_several_teachers_share_a_line_by_their_weights(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"prompt": "?", "teacher": {"math": 3, "code": 1.0}})
    assert prompt.teachers == {"math": 0.75, "code": 0.25}


def test_a_default_teacher_takes_lines_that_name_none(tmp_path: Path) -> None:
    named, unnamed, null = read(
        tmp_path,
        {"prompt": "?", "teacher": "math"},
        {"prompt": "?"},
        {"prompt": "?", "teacher": None},
        default_teacher="code",
    )
    assert [*named.teachers, *unnamed.teachers, *null.teachers] == ["math", "code", "code"]


def test_one_teacher_needs_no_naming(tmp_path: Path) -> None:
    assert read(tmp_path, {"prompt": "?"}, teachers=["only"])[0].teachers == {"only": 1}


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    line = json.dumps({"prompt": "line\u2028separator", "teacher": "math"}, ensure_ascii=False)
    path.write_text(f"\n{line}\n   \n{line}\n" + '{"prompt": "?", "teacher": "x"}', "utf-8")
    with pytest.raises(DataError, match=r"data\.jsonl:5: teacher 'x' is unknown"):
        read_prompts(DataConfig(prompts=path), TEACHERS)
    path.write_text(f"\n{line}\n   \n{line}", "utf-8")
    assert [p.index for p in read_prompts(DataConfig(prompts=path), TEACHERS)] == [0, 1]


TO_MATH = {"teacher": "math"}
OK = {"prompt": "?", **TO_MATH}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"prompt": "?"}, "no 'teacher' or 'data_source' or 'tag' or 'dataset'; known teachers"),
        ({"prompt": "?", "teacher": "maths"}, "teacher 'maths' is unknown; known teachers are"),
        ({"prompt": "?", "teacher": {"math": 1, "x": 1}}, "teacher 'x' is unknown; known teachers"),
        ({"prompt": "?", "teacher": {"math": 0}}, "expected a name, or names with weights above 0"),
        ({"prompt": "?", "teacher": {"math": float("inf")}}, "expected a name, or names with"),
        ({"prompt": "?", "teacher": {"math": 10**400}}, "expected a name, or names with weights"),
        (
            {"prompt": "?", "teacher": {"math": 1e308, "code": 1e308}},  # shares of an infinite sum
            "expected a name, or names with weights above 0",
        ),
        ({"prompt": "?", "teacher": {}}, "expected a name, or names with weights above 0"),
        ({"prompt": "?", "teacher": ["math"]}, "expected a name, or names with weights above 0"),
        ({"prompt": 5, "teacher": "math"}, "'prompt' is 5; expected text"),
        ({"prompt": "", "teacher": "math"}, "'prompt' is ''; expected text"),
        ({"prompt": "half \ud83d", "teacher": "math"}, r"'prompt' is 'half \ud83d'; expected text"),
        ({"question": "?", "teacher": "math"}, "found keys question, teacher; expected 'messages'"),
        ({"messages": [], "teacher": "math"}, "'messages' is empty"),
        ({"messages": "hello", "teacher": "math"}, "'messages' is not a list of {role, content}"),
        ({"messages": None, "teacher": "math"}, "'messages' is not a list of {role, content}"),
        (
            {"messages": [{"role": "user"}], "teacher": "math"},
            "'messages' is not a list of {role, content} with text in both",
        ),
        (
            {"messages": [{"role": "assistant", "content": "7"}], "teacher": "math"},
            "'messages' ends with an assistant turn; expected a turn that the student can answer",
        ),
        (
            {"messages": turns("user", "?", "assistant", "\ud83d", "user", "?"), **TO_MATH},
            "turn 2 of 'messages' holds half a character",
        ),
        ([1, 2], "found a list, expected a JSON object"),
    ],
)
def test_a_wrong_line_is_named_by_file_and_number(
    tmp_path: Path, line: object, sentence: str
) -> None:
    told = refusal(tmp_path, OK, OK, line)
    assert told.startswith("…/data.jsonl:3: ")
    assert sentence in told


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"prompt": "?", "teacher": "math"}\n{"prompt": \n', "2: not JSON (Expecting value"),
        (b'{"prompt": "?", "teacher": "math"}\n{"prompt": "\xff"}\n', "2: not UTF-8 (invalid"),
        (b'{"prompt": "?", "n": 1%s}\n' % (b"0" * 5_000), "1: JSON that cannot be read (Exceeds"),
        (b'{"n": %s}\n' % (b"[" * 100_000), "1: JSON that cannot be read (maximum recursion"),
        (b"\n  \n", "no prompts in it; expected one JSON object a line"),
    ],
)
def test_a_file_that_is_no_jsonl_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as told:
        read_prompts(DataConfig(prompts=path), TEACHERS)
    assert str(told.value).startswith(f"{path}:")
    assert sentence in str(told.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file; expected prompts as JSONL"):
        read_prompts(DataConfig(prompts=tmp_path / "none.jsonl"), TEACHERS)


def test_bad_lines_can_be_skipped_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[object] = [
        {"prompt": "1", "teacher": "math"},
        {"prompt": "2", "teacher": "history"},
        ["3"],
        {"prompt": "4", "teacher": "code"},
    ]
    found = read(tmp_path, *lines, on_bad_line="skip")
    assert [(prompt.index, prompt.messages[0].content) for prompt in found] == [(0, "1"), (1, "4")]
    [line] = caplog.messages
    assert "data.jsonl: 2 lines skipped, the first because " in line
    assert "data.jsonl:2: teacher 'history' is unknown" in line
    assert "data.jsonl:2: teacher 'history'" in refusal(tmp_path, *lines)


def test_data_with_nothing_but_bad_lines_is_refused_all_the_same(tmp_path: Path) -> None:
    assert "no prompts in it" in refusal(tmp_path, ["3"], on_bad_line="skip")
