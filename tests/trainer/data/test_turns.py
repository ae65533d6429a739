"""Rows with tools, tool calls and thinking, and the turns of conversations."""

import json
from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Prompt
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.run import DataConfig, RunConfig
from mopd_trainer.data.prompts import read_prompts
from tests.tool_templates import CALCULATOR

CALL = {"type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1"}'}}
ROW: dict[str, Any] = {
    "tools": [CALCULATOR],
    "messages": [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "thinking": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "name": "calculator"},
        {"role": "assistant", "content": "one", "teacher": "other"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "two"},
    ],
}


def read(tmp_path: Path, *rows: dict[str, Any], **config: Any) -> list[Prompt]:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig.model_validate({"prompts": path, "default_teacher": "math", **config})
    return read_prompts(data, ["math", "other"])


def without_teachers(row: dict[str, Any]) -> dict[str, Any]:
    messages = [{k: v for k, v in m.items() if k != "teacher"} for m in row["messages"]]
    return {**row, "messages": messages}


def test_last_turn_has_the_whole_conversation_with_its_tools(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, without_teachers(ROW), source="answers")
    assert prompt.tools == (CALCULATOR,)
    assert len(prompt.messages) == 6
    call_message = prompt.messages[2]
    assert call_message.thinking == "hm"
    assert call_message.tool_calls is not None
    assert call_message.tool_calls[0].function.arguments == {"expression": "1"}
    assert prompt.messages[3].name == "calculator"
    assert (prompt.answer, prompt.reply, prompt.turn) == ("two", None, 0)


@pytest.mark.parametrize("source", ["answers", "rollout"])
def test_all_turns_are_prompts_with_their_own_teachers(tmp_path: Path, source: str) -> None:
    prompts = read(tmp_path, ROW, ROW, turns="all", source=source)
    assert [p.index for p in prompts] == [0, 1, 2, 3, 4, 5]
    assert [p.turn for p in prompts] == [0, 1, 2, 0, 1, 2]
    assert [p.conversation for p in prompts] == [0, 0, 0, 3, 3, 3]
    assert [len(p.messages) for p in prompts[:3]] == [2, 4, 6]
    assert [[*p.teachers] for p in prompts[:3]] == [["math"], ["other"], ["math"]]
    if source == "rollout":
        assert [p.reply for p in prompts[:3]] == [None] * 3
    else:
        replies = [p.reply for p in prompts[:3]]
        assert [reply and reply.content for reply in replies] == ["", "one", "two"]
        assert replies[0] is not None
        assert replies[0].tool_calls is not None


def test_open_conversation_is_a_turn_of_the_student_only(tmp_path: Path) -> None:
    row = {**ROW, "messages": ROW["messages"][:-1]}
    assert [p.turn for p in read(tmp_path, row, turns="all")] == [0, 1, 2]
    assert [p.turn for p in read(tmp_path, row, turns="all", source="answers")] == [0, 1]


def test_reference_with_a_call_is_a_message(tmp_path: Path) -> None:
    row = {**ROW, "messages": ROW["messages"][:3]}
    [prompt] = read(tmp_path, row, source="answers")
    assert prompt.reply is not None
    assert prompt.reply.thinking == "hm"
    assert "calculator" in str(prompt.answer)
    [sampled] = read(tmp_path, row)
    assert sampled.reply is None
    assert "calculator" in sampled.metadata["answer"]


def test_tools_may_be_json_text_and_calls_have_no_wrapper(tmp_path: Path) -> None:
    message = {"role": "assistant", "tool_calls": [CALL["function"]]}
    row = {
        "tools": json.dumps([CALCULATOR]),
        "messages": [*ROW["messages"][:2], message, ROW["messages"][3]],
    }
    [prompt] = read(tmp_path, row)
    assert prompt.tools == (CALCULATOR,)
    [call] = prompt.messages[2].tool_calls or []
    assert call.function.name == "calculator"


def test_ignored_keys_are_not_read(tmp_path: Path) -> None:
    row = without_teachers(ROW)
    row["messages"][2]["content"] = "hm"
    [prompt] = read(tmp_path, row, ignored_keys=["tools", "tool_calls", "thinking"])
    assert prompt.tools == ()
    assert prompt.messages[2].model_dump() == {"role": "assistant", "content": "hm"}


@pytest.mark.parametrize(
    ("row", "config"),
    [
        (ROW, {}),  # a teacher of a turn
        ({**ROW, "tools": "no json"}, {"turns": "all"}),
        ({**ROW, "tools": [1]}, {"turns": "all"}),
        ({"messages": [*ROW["messages"][:3], *ROW["messages"][4:]]}, {"turns": "all"}),
        (
            {"messages": [*ROW["messages"][:2], {**ROW["messages"][4], "teacher": "x"}]},
            {"turns": "all"},
        ),
        ({"messages": ROW["messages"][:2]}, {"turns": "all", "source": "answers"}),
        (
            {"messages": [{**ROW["messages"][1], "teacher": "math"}, {**ROW["messages"][4]}]},
            {"turns": "all"},
        ),
    ],
)
def test_invalid_rows_are_named(
    tmp_path: Path, row: dict[str, Any], config: dict[str, Any]
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, row, **config)
    assert caught.value.key == f"{tmp_path / 'data.jsonl'}:1"


def test_fingerprint_covers_tools_and_turns(tmp_path: Path) -> None:
    def fingerprint(row: dict[str, Any], **config: Any) -> str:
        data = {"prompts": "x", "default_teacher": "math", **config}
        run = RunConfig.model_validate(
            {
                "output_dir": "x",
                "max_steps": 1,
                "data": data,
                "student": {"model": "x"},
                "rollout": {"max_new_tokens": 8},
                "teachers": {"math": {"url": "http://x", "loss": {"type": "gold"}}},
            }
        )
        return RunIdentity.of(run, read(tmp_path, row, **config)).data_fingerprint

    plain = without_teachers(ROW)
    distinct = {
        fingerprint(plain),
        fingerprint({**plain, "tools": []}),
        fingerprint(plain, turns="all"),
        fingerprint(plain, turns="all", source="answers"),
    }
    assert len(distinct) == 4
