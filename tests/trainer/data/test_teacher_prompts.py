"""A teacher's own prompt: messages of the row and of the teacher's settings."""

from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Message, Prompt, messages_for
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.run import DataConfig, RunConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.data.prompts import read_prompts
from mopd_trainer.evaluation.sets import read_run_sets
from tests.trainer.runs import run_values, write_lines

LINE = {"prompt": "3 + 4 =", "teacher": {"math": 1, "code": 1}}


def read(
    folder: Path, line: dict[str, Any], math: dict[str, Any] | None = None, **data: Any
) -> Prompt:
    """Return the only prompt of a file; ``code`` has no settings."""
    config = DataConfig(prompts=write_lines(folder / "data.jsonl", [line]), **data)
    settings = {"math": math or {}, "code": {}}
    teachers = {
        name: TeacherConfig.model_validate({"url": "http://a", **each})
        for name, each in settings.items()
    }
    (prompt,) = read_prompts(config, teachers)
    return prompt


def seen(prompt: Prompt, teacher: str) -> list[tuple[str, str]]:
    return [(each.role, each.content) for each in messages_for(prompt, teacher)]


def messages(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


OWN = [("system", "be exact"), ("user", "3 plus 4?")]
STUDENT = [("user", "3 + 4 =")]


@pytest.mark.parametrize(
    ("line", "settings", "expected"),
    [
        ({}, {}, STUDENT),
        ({"teacher_messages": messages(*OWN)}, {}, OWN),
        ({"teacher_messages": {"math": messages(*OWN), "code": None}}, {}, OWN),
        ({"teacher_messages": {"role": ["user"], "content": ["4 + 3?"]}}, {}, [("user", "4 + 3?")]),
        ({}, {"system_prompt": "add"}, [("system", "add"), *STUDENT]),
        (
            {"teacher_messages": messages(*OWN)},
            {"system_prompt": "add"},
            [("system", "add"), ("user", "3 plus 4?")],
        ),
        (
            {"shots": "1 + 1 = 2\n3 + 4 ="},
            {"prompt_key": "shots"},
            [("user", "1 + 1 = 2\n3 + 4 =")],
        ),
        ({"shots": messages(*OWN)}, {"prompt_key": "shots"}, OWN),
        ({"answer": "7"}, {"append_key": "answer"}, [("user", "3 + 4 =\n\n7")]),
        (
            {"shots": messages(*OWN), "answer": "7"},
            {"prompt_key": "shots", "append_key": "answer", "system_prompt": "add"},
            [("system", "add"), ("user", "3 plus 4?\n\n7")],
        ),
    ],
)
def test_a_teacher_sees_its_own_messages(
    tmp_path: Path,
    line: dict[str, Any],
    settings: dict[str, Any],
    expected: list[tuple[str, str]],
) -> None:
    prompt = read(tmp_path, {**LINE, **line}, settings)
    assert seen(prompt, "math") == expected
    assert [(each.role, each.content) for each in prompt.messages] == STUDENT
    of_all = isinstance(line.get("teacher_messages"), list) or "role" in line.get(
        "teacher_messages", {}
    )
    changed = {name for name in ("math", "code") if seen(prompt, name) != STUDENT}
    assert {*prompt.teacher_messages} == changed
    assert ("code" in changed) == of_all


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ({}, {"append_key": "answer"}),
        ({"answer": ""}, {"append_key": "answer"}),
        ({"answer": 7}, {"append_key": "answer"}),
        ({}, {"prompt_key": "shots"}),
        ({"shots": messages(("assistant", "7"))}, {"prompt_key": "shots"}),
        ({"shots": " "}, {"prompt_key": "shots"}),
        ({"shots": "a", "teacher_messages": messages(*OWN)}, {"prompt_key": "shots"}),
        ({"teacher_messages": {"physics": messages(*OWN)}}, {}),
        ({"teacher_messages": []}, {}),
        ({"teacher_messages": "3 plus 4?"}, {}),
        ({"shots": "an unknown key"}, {}),
    ],
)
def test_a_line_without_a_teachers_prompt_is_named(
    tmp_path: Path, line: dict[str, Any], settings: dict[str, Any]
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, {**LINE, **line}, settings)
    assert caught.value.key in (f"{tmp_path / 'data.jsonl'}:1",)
    assert "\n" not in str(caught.value)


def test_a_fallback_has_its_own_prompt(tmp_path: Path) -> None:
    line = {**LINE, "teacher": "code", "answer": "7"}
    config = DataConfig(prompts=write_lines(tmp_path / "data.jsonl", [line]))
    settings = {"code": {"on_error": "fallback:math"}, "math": {"append_key": "answer"}}
    teachers = {
        name: TeacherConfig.model_validate({"url": "http://a", **each})
        for name, each in settings.items()
    }
    (prompt,) = read_prompts(config, teachers)
    assert seen(prompt, "math") == [("user", "3 + 4 =\n\n7")]
    assert seen(prompt, "code") == STUDENT


def test_ignored_messages_of_teachers_are_not_read(tmp_path: Path) -> None:
    line = {**LINE, "teacher_messages": messages(*OWN), "shots": "4 + 3 ="}
    settings = {"prompt_key": "shots"}
    prompt = read(tmp_path, line, settings, ignored_keys=("teacher_messages",))
    assert seen(prompt, "math") == [("user", "4 + 3 =")]


def test_a_teachers_prompt_is_part_of_the_data_fingerprint(tmp_path: Path) -> None:
    config = RunConfig.model_validate(run_values(tmp_path))
    plain = Prompt(0, (Message(role="user", content="?"),), {"math": 1.0})
    own = [
        Prompt(0, plain.messages, plain.teachers, teacher_messages={"math": (message,)})
        for message in (Message(role="user", content="!"), Message(role="system", content="!"))
    ]
    fingerprints = {RunIdentity.of(config, [each]).data_fingerprint for each in (plain, *own)}
    assert len(fingerprints) == 3


def test_settings_of_a_teachers_prompt_are_part_of_the_run(tmp_path: Path) -> None:
    values = run_values(tmp_path)
    plain = RunIdentity.of(RunConfig.model_validate(values), [])
    for name in ("system_prompt", "prompt_key", "append_key"):
        changed = {**values["teachers"], "math": {**values["teachers"]["math"], name: "x"}}
        other = RunIdentity.of(RunConfig.model_validate({**values, "teachers": changed}), [])
        assert other.settings != plain.settings


def test_an_evaluated_teacher_has_its_own_prompt(tmp_path: Path) -> None:
    other = {"physics": messages(*OWN)}  # of a teacher that is not evaluated
    line = {"prompt": "3 + 4 =", "answer": "7", "shots": "1 + 1 = 2\n3 + 4 ="}
    lines = [{**line, "teacher_messages": other}]
    path = write_lines(tmp_path / "held_out.jsonl", lines)
    sets = {"sums": {"prompts": str(path), "grader": "exact", "answer_key": "answer"}}
    values = run_values(tmp_path, evaluation={"every": 1, "teachers": True, "sets": sets})
    values["teachers"]["math"]["prompt_key"] = "shots"
    (loaded,) = read_run_sets(RunConfig.model_validate(values))
    assert seen(loaded.prompts[0], "math") == [("user", line["shots"])]
    assert seen(loaded.prompts[0], "code") == STUDENT
    values["teachers"]["math"]["prompt_key"] = "examples"
    with pytest.raises(DataError):
        read_run_sets(RunConfig.model_validate(values))
    sets["sums"]["teachers"] = ["code"]  # a teacher that is not evaluated needs no column
    read_run_sets(RunConfig.model_validate(values))


@pytest.mark.parametrize(
    ("line", "settings", "own"),
    [
        ({"teacher_messages": messages(*OWN)}, {}, OWN),
        ({}, {"system_prompt": "add"}, [("system", "add"), *STUDENT]),
        ({"hint": "7"}, {"append_key": "hint"}, [("user", "3 + 4 =\n\n7")]),
    ],
)
def test_later_turns_follow_the_teachers_messages(
    tmp_path: Path, line: dict[str, Any], settings: dict[str, Any], own: list[tuple[str, str]]
) -> None:
    later = [("assistant", "7"), ("user", "5 + 5 =")]
    row = {"messages": messages(*STUDENT, *later, ("assistant", "10")), "teacher": "math", **line}
    data = DataConfig(prompts=write_lines(tmp_path / "data.jsonl", [row]), turns="all")
    teachers = {"math": TeacherConfig.model_validate({"url": "http://a", **settings})}
    first, second = read_prompts(data, teachers)
    assert seen(first, "math") == own
    assert [(each.role, each.content) for each in second.messages] == [*STUDENT, *later]
    assert seen(second, "math") == [*own, *later]
