"""Messages with tool calls and thinking: their form for templates, on the wire and in keys."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mopd_client.score_store import ScoreKey
from mopd_protocol.errors import TeacherError
from mopd_protocol.messages import Message, template_messages
from mopd_protocol.request_tokenizer import RequestTokenizer
from mopd_protocol.requests import LogprobsRequest, SequenceRequest
from tests.tool_templates import CALCULATOR, TEMPLATES, tool_tokenizer

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


def call(arguments: Any = None, **fields: Any) -> dict[str, Any]:
    given_arguments = {"expression": "37*14"} if arguments is None else arguments
    return {"function": {"name": "calculator", "arguments": given_arguments}, **fields}


def conversation(arguments: Any = None) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "37*14?"},
        {"role": "assistant", "content": None, "tool_calls": [call(arguments, id="abcdefghi")]},
        {"role": "tool", "content": "518", "tool_call_id": "abcdefghi"},
    ]


def sequence(arguments: Any = None, **fields: Any) -> SequenceRequest:
    return SequenceRequest.model_validate(
        {"messages": conversation(arguments), "completion": "518", "tools": [CALCULATOR], **fields}
    )


@given(arguments=st.dictionaries(st.text(max_size=3), VALUES, max_size=3))
def test_arguments_survive_the_wire_as_an_object_with_their_order(
    arguments: dict[str, Any],
) -> None:
    for spelled in (arguments, json.dumps(arguments)):
        message = Message.model_validate({"role": "assistant", "tool_calls": [call(spelled)]})
        [dumped] = message.model_dump()["tool_calls"]
        assert json.dumps(dumped["function"]["arguments"]) == json.dumps(arguments)
        assert message.content == ""
    sent = sequence(arguments).model_dump_json(exclude_none=True)
    assert SequenceRequest.model_validate_json(sent) == sequence(arguments)
    assert SequenceRequest.model_validate_json(sent).model_dump_json(exclude_none=True) == sent


def test_keys_without_a_value_are_missing_for_templates() -> None:
    plain = {"role": "user", "content": "?"}
    assert Message.model_validate({**plain, "tool_calls": [], "name": None}).model_dump() == plain
    for key in ("thinking", "reasoning_content"):
        message = Message.model_validate({**plain, key: "hm"})
        assert message.thinking == "hm"
        assert message.model_dump() == {**plain, "reasoning_content": "hm"}
    [dumped] = Message.model_validate(conversation()[1]).model_dump()["tool_calls"]
    assert dumped == {**call(), "id": "abcdefghi", "type": "function"}


@pytest.mark.parametrize(
    "fields",
    [
        {"content": None},
        {"tool_calls": [call("no json")]},
        {"tool_calls": [call("[1]")]},
        {"tool_calls": [call(type="retrieval")]},
        {"tool_calls": [{"name": "calculator"}]},
        {"functions": [1]},
    ],
)
def test_invalid_messages_are_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Message.model_validate({"role": "assistant", "content": "!", **fields})


def test_tools_need_messages() -> None:
    with pytest.raises(ValidationError, match="tools without messages"):
        SequenceRequest.model_validate({"prompt": "?", "completion": "!", "tools": [CALCULATOR]})


def test_score_keys_distinguish_tools_and_the_order_of_arguments() -> None:
    def digest(each: SequenceRequest) -> str:
        return ScoreKey.of("m", LogprobsRequest(sequences=[each]), each).digest

    same = digest(sequence({"a": 1, "b": 2}))
    assert digest(sequence({"a": 1, "b": 2}, id="other")) == same
    others = [
        sequence({"b": 2, "a": 1}),
        sequence({"a": 1, "b": 2}, tools=None),
        sequence({"a": 1, "b": 2}, tools=[CALCULATOR, CALCULATOR]),
    ]
    assert len({same, *map(digest, others)}) == 4


@pytest.mark.parametrize("family", TEMPLATES)
def test_teacher_renders_tools_and_calls_as_its_template_does(family: str) -> None:
    chat = tool_tokenizer(family)
    teacher = RequestTokenizer.wrap(chat)
    tools = {"xml_tools" if family == "smollm_3" else "tools": [CALCULATOR]}
    messages: list[dict[str, Any]] = conversation()
    messages[1]["content"] = ""
    if family == "smollm_3":
        text = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37*14"}}\n'
        messages[1] = {"role": "assistant", "content": f"{text}</tool_call>"}
    expected = chat.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **tools
    )
    assert '{"expression": "37*14"}' in expected
    assert "Value of an expression" in expected
    ids = teacher.tokenize(sequence()).prompt_ids.tolist()
    assert ids == chat(expected, add_special_tokens=False)["input_ids"]
    without = teacher.tokenize(sequence(tools=None)).prompt_ids.tolist()
    assert without != ids


def test_template_without_tools_rejects_them() -> None:
    chat = tool_tokenizer("qwen_3")
    chat.chat_template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    with pytest.raises(TeacherError) as caught:
        RequestTokenizer.wrap(chat).tokenize(sequence())
    assert (caught.value.status, caught.value.key) == (422, "messages")


def test_calls_are_text_for_a_template_without_calls() -> None:
    messages = [Message.model_validate(each) for each in conversation({"a": None})]
    shown = template_messages(messages, "{{ messages }}")
    assert shown[1]["content"].count('{"name": "calculator", "arguments": {"a": null}}') == 1
    assert "tool_calls" not in shown[1]
    assert template_messages(messages, TEMPLATES["qwen_3"])[1]["content"] == ""
