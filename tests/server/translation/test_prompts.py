"""The messages behind a student's ids: from the request, registered, or by the chat template."""

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_protocol.errors import DataError, TeacherError
from mopd_protocol.request_tokenizer import RequestTokenizer
from mopd_protocol.samples import Message
from mopd_server.service_error import ServiceError
from mopd_server.translation.prompts import PromptResolver, read_prompts
from tests import tiny_models
from tests.chat_templates import TEMPLATES, chat_tokenizer

USER = [Message(role="user", content="3 + 4 =")]
SYSTEM = [Message(role="system", content="Be brief."), *USER]
TURNS = [
    Message(role="user", content="the dog\n\n 12"),
    Message(role="assistant", content="a fox, où?"),
    Message(role="user", content="and 漢字 🙂"),
    Message(role="assistant", content="15"),
    *USER,
]


@cache
def student(family: str) -> RequestTokenizer:
    return RequestTokenizer.wrap(chat_tokenizer(family))


@cache
def resolver(family: str) -> PromptResolver:
    return PromptResolver(student(family), {})


def completion_of(family: str, text: str) -> list[int]:
    return [*student(family).encoder.encode(text), student(family).table.roles.ending[0]]


@pytest.mark.parametrize("messages", [USER, SYSTEM, TURNS], ids=["user", "system", "turns"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_messages_follow_from_the_ids_of_well_known_templates(family: str, messages) -> None:
    try:
        prompt = resolver(family).render(messages)
    except TeacherError:
        pytest.skip("a template without this role")

    parsed = resolver(family).resolve(prompt + completion_of(family, "it is 7"), None, "prompt[0]")

    assert parsed.tokens == len(prompt)
    assert resolver(family).render(parsed.messages) == prompt
    # The system message is a part of the user's.
    if messages is not SYSTEM or family not in ("gemma_3", "mistral", "vicuna"):
        assert list(parsed.messages) == list(messages)


@given(
    texts=st.lists(st.text(max_size=12), min_size=1, max_size=5).filter(lambda x: len(x) % 2),
    completion=st.text(max_size=12),
    family=st.sampled_from(["chatml", "qwen_2", "phi_3"]),
)
def test_parsed_messages_render_to_the_same_ids(texts, completion, family) -> None:
    roles = ["user", "assistant"] * len(texts)
    messages = [Message(role=r, content=t) for r, t in zip(roles, texts, strict=False)]
    prompt = resolver(family).render(messages)
    ids = prompt + completion_of(family, completion)

    parsed = resolver(family).resolve(ids, None, "prompt[0]")

    assert resolver(family).render(parsed.messages) == ids[: parsed.tokens]
    assert parsed.tokens >= len(prompt)


def test_the_template_of_sentencepiece_tokens_is_inverted() -> None:
    own = RequestTokenizer.wrap(tiny_models.sentencepiece_tokenizer())
    resolver = PromptResolver(own, {})
    prompt = resolver.render(TURNS[:3])

    parsed = resolver.resolve([*prompt, *own.encoder.encode("it")], None, "prompt[0]")

    assert (parsed.messages, parsed.tokens) == (tuple(TURNS[:3]), len(prompt))


@pytest.mark.parametrize("position", [0, 3, 7])
def test_the_first_position_that_differs_is_named(position: int) -> None:
    ids = resolver("chatml").render(USER)
    start = student("chatml").table.controls["<|im_start|>"]
    ids[position] = start if ids[position] != start else start + 1

    with pytest.raises(ServiceError) as caught:
        resolver("chatml").resolve(ids + completion_of("chatml", "7"), None, "prompt[2]")

    error = caught.value
    assert (error.status, error.code) == (400, "unknown_prompt")
    assert error.key == f"prompt[2][{position}]"


def test_tokens_that_a_template_would_not_produce_are_no_prompt() -> None:
    table = student("chatml").table
    ids = resolver("chatml").render([Message(role="user", content="the")])
    whole = table.all_bytes.index(b"the")
    at = ids.index(whole)
    pieces = [table.all_bytes.index(bytes([byte])) for byte in b"the"]

    with pytest.raises(ServiceError) as caught:
        resolver("chatml").resolve([*ids[:at], *pieces, *ids[at + 1 :], 5], None, "prompt[0]")

    assert caught.value.key == f"prompt[0][{at}]"


def test_messages_of_the_request_are_compared_with_the_ids() -> None:
    ids = resolver("chatml").render(USER)

    parsed = resolver("chatml").resolve([*ids, 5], USER, "prompt[0]")
    assert (parsed.messages, parsed.tokens) == (tuple(USER), len(ids))

    other = [Message(role="user", content="3 + 5 =")]
    expected = resolver("chatml").render(other)
    position = next(i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b)
    with pytest.raises(ServiceError) as caught:
        resolver("chatml").resolve([*ids, 5], other, "prompt[0]")
    assert (caught.value.status, caught.value.key) == (400, f"prompt[0][{position}]")


def test_the_longest_registered_prompt_is_found_where_no_template_can_be_inverted() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '>' }}{% endif %}"
    )
    short, long = ([Message(role="user", content=c)] for c in ("a", "a>b"))
    resolver = PromptResolver(RequestTokenizer.wrap(tokenizer), {}, [short, long])
    ids = resolver.render(long)

    assert len(resolver) == 2
    assert resolver.resolve([*ids, 5], None, "prompt[0]").messages == tuple(long)
    shorter = resolver.resolve([*resolver.render(short), 5], None, "prompt[0]")
    assert shorter.messages == tuple(short)
    with pytest.raises(ServiceError) as caught:
        resolver.resolve(ids[1:], None, "prompt[0]")
    assert caught.value.code == "unknown_prompt"


def test_turns_behind_a_registered_prompt_are_messages() -> None:
    resolver = PromptResolver(student("chatml"), {}, [TURNS[:1]])
    ids = resolver.render(TURNS)

    assert resolver.resolve([*ids, 5], None, "prompt[0]").messages == tuple(TURNS)
    # ids behind the end of a completion that are no turn
    prompt = resolver.render(TURNS[:1])
    end = student("chatml").table.roles.ending[0]
    assert resolver.resolve([*prompt, 5, end, 6, 7], None, "prompt[0]").tokens == len(prompt)


def test_variables_of_the_template_apply_to_all_prompts() -> None:
    resolver = PromptResolver(student("qwen_3"), {"enable_thinking": False})
    ids = resolver.render(USER)
    assert len(ids) > len(PromptResolver(student("qwen_3"), {}).render(USER))

    assert resolver.resolve([*ids, 5], None, "prompt[0]").tokens == len(ids)


def test_prompts_are_read_from_messages_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    reference = {"role": "assistant", "content": "7"}
    rows = [
        {"messages": [*(m.model_dump() for m in SYSTEM), reference], "teacher": "math"},
        {"prompt": [m.model_dump() for m in TURNS]},
        {"prompt": "3 + 4 =", "answer": "7"},
    ]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    assert [*read_prompts(path)] == [SYSTEM, TURNS, USER]

    path.write_text('{"prompt": "a"}\n{"other": "b"}')
    with pytest.raises(DataError) as caught:
        [*read_prompts(path)]
    assert caught.value.key == "prompts"
    assert "line 2" in str(caught.value)
    with pytest.raises(DataError):
        [*read_prompts(tmp_path / "missing")]
