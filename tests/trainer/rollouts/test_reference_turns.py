"""Reference turns as completions: what the template makes of a message, and no byte of another."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_protocol.errors import DataError
from mopd_protocol.messages import Message
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.rollouts.reference_completions import ReferenceCompletions
from mopd_trainer.rollouts.reference_turns import reply_token_ids
from mopd_trainer.student.identity import StudentIdentity
from tests import tiny_models
from tests.tool_templates import CALCULATOR, TEMPLATES, tool_tokenizer

TEXTS = st.text("abz é\n<>7🙂", max_size=8)


@cache
def student(family: str) -> StudentIdentity:
    tokenizer = tool_tokenizer(family)
    identity = StudentIdentity.of(tiny_models.qwen(tokenizer), tokenizer)
    return replace(identity, max_length=None)


@st.composite
def conversations(draw: st.DrawFn, family: str) -> list[dict[str, Any]]:
    """Draw a conversation; ``env`` marks the texts of the environment, ``own`` the student's."""

    def text(mark: str) -> str:
        return f"{mark} {draw(TEXTS)} {mark}"

    messages: list[dict[str, Any]] = []
    if family != "mistral" and draw(st.booleans()):
        messages.append({"role": "system", "content": text("env")})
    for _ in range(draw(st.integers(1, 2))):
        messages.append({"role": "user", "content": text("env")})
        for _ in range(draw(st.integers(0, 2))):
            count = 1 if family == "llama_3_1" else draw(st.integers(1, 2))
            ids = [f"call{len(messages):04}{n}" for n in range(count)]
            has_content = family in ("qwen_3", "smollm_3") and draw(st.booleans())
            messages.append(
                {
                    "role": "assistant",
                    "content": text("own") if has_content else "",
                    "tool_calls": [
                        {
                            "id": each,
                            "function": {
                                "name": "calculator",
                                "arguments": {"expression": text("own")},
                            },
                        }
                        for each in ids
                    ],
                }
            )
            messages += [
                {"role": "tool", "content": text("env"), "tool_call_id": each} for each in ids
            ]
        messages.append({"role": "assistant", "content": text("own")})
    if family == "qwen_3":
        for message in messages:
            if message["role"] == "assistant" and draw(st.booleans()):
                message["reasoning_content"] = text("own")
    return messages


def rendered(family: str, messages: list[dict[str, Any]], *, continues: bool) -> str:
    """Render as a user of transformers would."""
    tools = {"xml_tools" if family == "smollm_3" else "tools": [CALCULATOR]}
    if family == "smollm_3":
        messages = [with_text_calls(each) for each in messages]
    tokenizer: Any = student(family).tokenizer
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=continues, **tools
    )


def with_text_calls(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    [*parts] = [message["content"]] if message["content"] else []
    for each in message["tool_calls"]:
        arguments = tiny_models.json.dumps(each["function"]["arguments"], ensure_ascii=False)
        parts.append(
            f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'
        )
    return {"role": "assistant", "content": "\n".join(parts)}


def prompt_of(messages: list[dict[str, Any]], place: int) -> Prompt:
    read = [Message.model_validate(each) for each in messages]
    return Prompt(
        index=place,
        messages=tuple(read[:place]),
        teachers={"math": 1.0},
        tools=(CALCULATOR,),
        reply=read[place],
    )


def literal(family: str, ids: list[int]) -> bytes:
    table = student(family).table
    names = {token_id: name.encode() for name, token_id in table.controls.items()}
    return b"".join(names.get(each) or table.bytes_of(each) for each in ids)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_turn_is_what_the_template_adds_and_no_byte_of_the_environment(
    family: str, data: st.DataObject
) -> None:
    messages = data.draw(conversations(family))
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = prompt_of(messages, place)
        before = rendered(family, messages[:place], continues=True)
        whole = rendered(family, messages[: place + 1], continues=False)
        expected_ids = student(family).tokenizer(before, add_special_tokens=False)["input_ids"]
        assert student(family).prompt_token_ids(prompt.messages, prompt.tools) == expected_ids
        ids = reply_token_ids(prompt, student(family))
        completion = literal(family, ids).decode()
        assert (before + completion).rstrip("\n") == whole.rstrip("\n")
        assert ids[-1] in student(family).table.roles.ending
        assert "env" not in completion
        assert completion.count("own") == str(message).count("own")


def test_thinking_of_earlier_turns_is_stripped_where_the_template_does_so() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "thinking": "early"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "thinking": "late"},
    ]
    first, second = prompt_of(messages, 1), prompt_of(messages, 3)
    identity = student("qwen_3")
    assert b"early" in literal("qwen_3", reply_token_ids(first, identity))
    assert "early" not in identity.render(second.messages)
    assert b"late" in literal("qwen_3", reply_token_ids(second, identity))


@pytest.mark.parametrize(
    ("family", "before", "reply"),
    [
        # The system message moves to the last message, which the reply is then.
        ("mistral", [{"role": "system", "content": "s"}], {"content": "x"}),
        ("llama_3_1", [], {"content": "x", "thinking": "hidden"}),
        (
            "llama_3_1",
            [],
            {"content": "lost", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        ),
        ("qwen_3", [], {"content": "a<|im_end|>b"}),
    ],
)
def test_a_turn_that_the_template_changes_is_dropped_and_counted(
    family: str, before: list[dict[str, Any]], reply: dict[str, Any]
) -> None:
    user = {"role": "user", "content": "q"}
    prompt = prompt_of([*before, user, {"role": "assistant", **reply}], len(before) + 1)
    with pytest.raises(DataError) as caught:
        reply_token_ids(prompt, student(family))
    assert caught.value.key == "data.turns"
    if before:
        whole = student(family).render(
            [*prompt.messages, *filter(None, [prompt.reply])],
            prompt.tools,
            add_generation_prompt=False,
        )
        start = student(family).render(prompt.messages, prompt.tools)
        differing = next(n for n, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b)
        assert f"byte {len(start[:differing].encode())} " in str(caught.value)
    config = RolloutConfig(max_new_tokens=500)
    reader = ReferenceCompletions(student(family), config, max_length=None, scored=True)
    plain = replace(prompt, reply=None, answer="fine")
    [kept] = reader.rollouts([prompt, plain], step=0)
    assert kept.completion.text == b"fine"
    assert np.array_equal(
        kept.prompt_token_ids, student(family).prompt_token_ids(prompt.messages, prompt.tools)
    )
    assert reader.pop_dropped() == {"turn_rejected": 1}
