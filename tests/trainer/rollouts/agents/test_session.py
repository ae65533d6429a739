"""Trajectories keep the ids that the student sampled, and see what the template shows."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from mopd_protocol.errors import DataError
from mopd_protocol.messages import Message
from mopd_protocol.samples import Prompt, messages_for
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.rollouts.agents.rounds import Rounds, Weights
from mopd_trainer.rollouts.agents.session import ChatStudent, Session
from tests.tool_templates import CALCULATOR, TEMPLATES
from tests.trainer.rollouts.agents.scripted_student import ScriptedGenerator, single_bytes
from tests.trainer.rollouts.test_reference_turns import literal, rendered, student

USER = {"role": "user", "content": "37*14?"}
PROMPT = Prompt(index=0, messages=(Message(role="user", content="37*14?"),), teachers={"math": 1.0})
#: Completions with a call and without, as each family writes them.
COMPLETIONS = {
    "qwen_3": (
        '<think>\nhm\n</think>\n\nLet me.\n<tool_call>\n{"name": "calculator", "arguments": '
        '{"expression": "37*14"}}\n</tool_call><|im_end|>',
        "<think>\nok\n</think>\n\n518<|im_end|>",
    ),
    "llama_3_1": (
        '{"name": "calculator", "parameters": {"expression": "37*14"}}<|eot_id|>',
        "518<|eot_id|>",
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "37*14"}, '
        '"id": "abcdefghi"}]</s>',
        " 518</s>",
    ),
    "smollm_3": (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37*14"}}\n</tool_call>'
        "<|im_end|>",
        "518<|im_end|>",
    ),
}


def session_of(
    family: str, *completions: str, max_turns: int = 4, **settings: Any
) -> tuple[Session, ScriptedGenerator]:
    config = RolloutConfig.model_validate({"max_new_tokens": 8, **settings})
    generator = ScriptedGenerator(student(family), completions)
    rounds = Rounds(generator, config, seed=0, weights=Weights(3))
    chat_student = ChatStudent.of(student(family), config, max_turns)
    return Session(PROMPT, 5, chat_student, rounds.generate), generator


@pytest.mark.parametrize("family", TEMPLATES)
def test_two_turns_with_a_tool(family: str) -> None:
    async def converse() -> tuple[Session, list[dict[str, Any]]]:
        session, _ = session_of(family, *COMPLETIONS[family])
        call = await session.chat([USER], [CALCULATOR])
        assert call.tool_calls is not None
        [function] = [each.function for each in call.tool_calls]
        assert function.name == "calculator"
        assert function.arguments == {"expression": "37*14"}
        assert len(str(call.tool_calls[0].id)) == 9
        result = {"role": "tool", "content": "518", "tool_call_id": call.tool_calls[0].id}
        messages = [USER, call.model_dump(), result]
        ending = await session.chat(messages, [CALCULATOR])
        assert ending.content.strip() == "518"
        assert ending.thinking == ("ok" if family == "qwen_3" else None)
        return session, messages

    session, messages = asyncio.run(converse())
    first, second = session.rollouts
    assert (first.turn, second.turn, first.sample, second.sample) == (0, 1, 5, 5)
    assert (first.policy_version, first.finish_reason) == (3, "stop")
    assert first.completion.token_ids.tolist() == single_bytes(
        student(family), COMPLETIONS[family][0]
    )
    # Each prompt is what the template shows at that time, in the ids of the student's turn.
    for rollout, place in ((first, 1), (second, 3)):
        expected = rendered(family, messages[:place], continues=True)
        assert literal(family, rollout.prompt_token_ids.tolist()).decode() == expected
    before = [*first.prompt_token_ids.tolist(), *first.completion.token_ids.tolist()]
    if family == "mistral":  # shows the tools before the last user message: here the same one
        assert "[AVAILABLE_TOOLS]" in rendered(family, messages[:1], continues=True)
    assert second.prompt_token_ids.tolist()[: len(before)] == before
    text = second.completion.text + first.completion.text
    assert b"37*14?" not in text
    assert b"tool_response" not in text
    assert [m.role for m in second.prompt.messages] == ["user", "assistant", "tool"]
    assert second.prompt.tools == (CALCULATOR,)


def test_stripped_thinking_is_not_in_the_next_prompt() -> None:
    async def converse() -> Session:
        session, _ = session_of("qwen_3", "<think>\nhm\n</think>\n\na<|im_end|>", "b<|im_end|>")
        first = await session.chat([USER])
        await session.chat([USER, first, {"role": "user", "content": "more"}])
        return session

    first, second = asyncio.run(converse()).rollouts
    assert b"hm" in first.completion.text
    prompt = literal("qwen_3", second.prompt_token_ids.tolist()).decode()
    assert "hm" not in prompt
    expected = "<|im_start|>user\n37*14?<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    assert prompt.startswith(expected)
    ids = student("qwen_3").token_ids(prompt)
    assert second.prompt_token_ids.tolist() == ids


@pytest.mark.parametrize(
    "text",
    ["<tool_call>\n{broken}\n</tool_call>", "<tool_call>\n[1]\n</tool_call>", "<tool_call>", "a"],
)
def test_broken_calls_are_content(text: str) -> None:
    session, _ = session_of("qwen_3", f"{text}<|im_end|>")
    reply = asyncio.run(session.chat([USER], [CALCULATOR]))
    assert (reply.content, reply.tool_calls) == (text, None)


def test_cut_turn_continues_with_its_ids() -> None:
    async def converse() -> Session:
        session, _ = session_of("smollm_3", "abc", "d<|im_end|>")
        reply = await session.chat([USER])
        await session.chat([USER, reply, USER])
        return session

    first, second = asyncio.run(converse()).rollouts
    assert first.finish_reason == "length"
    before = [*first.prompt_token_ids.tolist(), *first.completion.token_ids.tolist()]
    assert second.prompt_token_ids.tolist()[: len(before)] == before


def test_limits_end_a_trajectory() -> None:
    async def converse() -> Session:
        session, _ = session_of("qwen_3", "a<|im_end|>", max_turns=1)
        await session.chat([USER])
        for _ in range(2):
            with pytest.raises(DataError):
                await session.chat([USER])
        return session

    assert asyncio.run(converse()).ended == "max_turns"
    config = RolloutConfig(max_new_tokens=10**6)
    limited = replace(student("qwen_3"), max_length=256)
    rounds = Rounds(ScriptedGenerator(limited, []), config, seed=0, weights=Weights(0))
    session = Session(PROMPT, 0, ChatStudent.of(limited, config, 4), rounds.generate)
    with pytest.raises(DataError) as caught:
        asyncio.run(session.chat([USER]))
    assert (session.ended, caught.value.key) == ("prompt_too_long", "messages")
    assert "1000000" in str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": "?", "function_call": {"name": "f"}},
    ],
)
def test_invalid_messages_are_rejected(message: dict[str, Any]) -> None:
    session, _ = session_of("qwen_3")
    with pytest.raises(DataError) as caught:
        asyncio.run(session.chat([message]))
    assert caught.value.key == "messages"
    assert session.ended is None


def test_teachers_with_their_own_messages_see_the_rest_of_the_conversation() -> None:
    own = {"math": (Message(role="user", content="37*14? It is 518."),)}

    async def converse() -> Session:
        session, _ = session_of("llama_3_1", "hm<|eot_id|>", "518<|eot_id|>")
        session.prompt = replace(session.prompt, teacher_messages=own)
        reply = await session.chat([USER])
        await session.chat([USER, reply, {"role": "user", "content": "And?"}])
        with pytest.raises(DataError) as error:
            await session.chat([{"role": "system", "content": "another beginning"}, USER])
        assert error.value.key == "teacher_messages"
        return session

    first, second = asyncio.run(converse()).rollouts
    assert [each.content for each in messages_for(first.prompt, "math")] == ["37*14? It is 518."]
    expected = ["37*14? It is 518.", "hm", "And?"]
    assert [each.content for each in messages_for(second.prompt, "math")] == expected
