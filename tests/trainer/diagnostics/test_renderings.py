"""Renderings of one conversation by the chat templates of two sides."""

from functools import cache
from itertools import combinations, product
from typing import Any

import pytest

from mopd_trainer.diagnostics.renderings import Difference, Side, first_difference
from tests.chat_templates import ADDING, PLAIN, TEMPLATES, chat_tokenizer

USER = {"role": "user", "content": "What is 3 + 4?"}
SYSTEM = {"role": "system", "content": "Reply briefly, in a system of numbers."}
THINKING = {"role": "assistant", "content": "<think>\nsmall numbers\n</think>\n\nIt is 7."}
REPLY = {"role": "assistant", "content": "It is 7."}
AGAIN = {"role": "user", "content": "user"}  # also the name of a role
CONVERSATIONS = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, REPLY, AGAIN, REPLY, USER],
    "system and turns": [SYSTEM, USER, REPLY, AGAIN],
}


@cache
def chat(family: str) -> Any:
    return chat_tokenizer(family)


def compare(
    messages: list[dict[str, str]], first: str, second: str, **options: Any
) -> Difference | None:
    sides = [Side(chat(family), options.pop(family, {})) for family in (first, second)]
    return first_difference(messages, *sides, same_tokens=options.get("same_tokens", False))


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_plain_families_agree(name: str) -> None:
    messages = CONVERSATIONS[name]
    families = [each for each in PLAIN if each != "gemma" or messages[0]["role"] != "system"]
    for first, second in combinations(families, 2):
        assert compare(messages, first, second) is None, (first, second)
    if name.startswith("system"):  # the default is not added
        for family in families:
            assert compare(messages, "qwen_2", family) is None
    for family in TEMPLATES:
        if family in families or family in ADDING:
            assert compare(messages, family, family, same_tokens=True) is None


@pytest.mark.parametrize(("adding", "plain"), [*product(ADDING, PLAIN), (*ADDING,)])
def test_a_default_system_prompt_and_a_date_are_reported(adding: str, plain: str) -> None:
    added = {"qwen_2": "You are a helpful assistant.", "llama_3_1": "Cutting Knowledge Date"}
    for name in ("one turn", "turns"):
        difference = compare(CONVERSATIONS[name], plain, adding)
        assert difference is not None
        assert difference.kind == "text"
        assert added[adding] in difference.excerpts[1] or added["qwen_2"] in difference.excerpts[0]
        rendering = Side(chat(adding)).render(CONVERSATIONS[name]).encode()
        assert rendering[difference.positions[1] :].decode().startswith(difference.excerpts[1])


#: Changes of ChatML.
CHATML = TEMPLATES["chatml"]
CHANGED = {
    "last turn only": CHATML.replace("in messages", "in messages[-1:]"),
    "no system": CHATML.replace("in messages", "in messages if message.role != 'system'"),
    "stripped": CHATML.replace("message.content", "message.content.strip()"),
    "stripped left": CHATML.replace("message.content", "message.content.lstrip()"),
    "lower case": CHATML.replace("message.content", "message.content.lower()"),
    "today": CHATML.replace("'<|im_end|>'", "' It is ' + day | default('Monday') + '<|im_end|>'"),
    "dated": CHATML.replace("'\n' + message.content", "'\nIt is Monday\n' + message.content"),
    "instruction": CHATML.replace("'<|im_end|>'", "' Think carefully step by step.<|im_end|>'"),
    "thinks": CHATML.replace("assistant\n'", "assistant\n<think>\n'"),
    "renamed": CHATML.replace("assistant\n'", "model\n'"),
    "spaces": CHATML.replace("'<|im_end|>' +", "'<|im_end|> ' +"),
}
SPACED = [{"role": "user", "content": "  2 + 2 = \n"}]


def changed(name: str, messages: list[dict[str, str]], **options: Any) -> Difference | None:
    other = chat_tokenizer("chatml")
    other.chat_template = CHANGED[name]
    return first_difference(messages, Side(chat("chatml")), Side(other), **options)


@pytest.mark.parametrize(
    ("name", "messages", "kind", "excerpts"),
    [
        ("last turn only", "system and turns", "message", ("Reply", "user<|im_end|>")),
        ("no system", "system", "message", ("Reply briefly", "What is 3")),
        ("stripped", [{"role": "user", "content": "4 + 4\n"}], "message", ("4 + 4\n", "4 + 4<")),
        ("stripped left", SPACED, "message", ("2 + 2", "2 + 2")),
        ("lower case", "one turn", "message", ("What", "what")),
        ("today", "one turn", "text", ("<|im_end|>", "It is Monday")),
        ("dated", "turns", "text", ("", "It is Monday")),
        ("instruction", "turns", "text", ("", "Think carefully")),
        ("thinks", "one turn", "thinking", ("", "<think>")),
    ],
)
def test_differences_of_text(
    name: str, messages: Any, kind: str, excerpts: tuple[str, str]
) -> None:
    messages = CONVERSATIONS.get(messages, ()) if isinstance(messages, str) else messages
    difference = changed(name, [*messages], same_tokens=False)
    assert difference is not None
    assert difference.kind == kind
    for excerpt, start in zip(difference.excerpts, excerpts, strict=True):
        assert start in excerpt
    assert changed(name, [*messages], same_tokens=True) == difference


def test_markup_is_compared_with_the_same_tokens_only() -> None:
    for name in ("renamed", "spaces"):
        assert changed(name, [USER], same_tokens=False) is None
        difference = changed(name, [USER], same_tokens=True)
        assert difference is not None
        assert difference.kind == "markup"
    plain = [{"role": "user", "content": "4 + 4"}]
    assert changed("stripped", plain, same_tokens=True) is None


def test_thinking_of_earlier_turns() -> None:
    turns = [USER, THINKING, AGAIN]
    difference = compare(turns, "qwen_3", "chatml")
    assert difference is not None
    assert difference.kind == "thinking"
    assert "assistant\nIt is 7." in difference.excerpts[0]
    assert difference.excerpts[1].startswith("<think>\nsmall numbers")
    assert compare(turns, "chatml", "gemma") is None  # both keep it
    assert compare([USER], "qwen_3", "chatml", qwen_3={"enable_thinking": False}) is not None
    assert compare([USER], "qwen_3", "qwen_3", same_tokens=True) is None


def test_texts_that_look_like_markup_or_repeat_are_no_difference() -> None:
    texts = ["", " ", "assistant\n", "<|im_end|>", "[INST]", "mopdpart0ax", "x" * 3, "\n\n🙂 é"]
    for text in texts[2:]:
        turn = {"role": "user", "content": text.strip()}
        for first, second in combinations(("chatml", "llama_3", "gemma", "phi_3"), 2):
            assert compare([turn, REPLY, turn], first, second) is None, (text, first, second)
