"""Tests of tokenization: requests -> token ids of the teacher."""

import inspect
from typing import Any

import jinja2
import jinja2.defaults
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from mopd_protocol import request_tokenizer
from mopd_protocol.errors import ConfigError, TeacherError, TokenizerError
from mopd_protocol.request_tokenizer import RequestTokenizer, TokenizedSequence
from mopd_protocol.requests import RESERVED_TEMPLATE_KEYS, SequenceRequest
from tests import tiny_models

MESSAGES = [{"role": "user", "content": "3 + 4 ="}]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, RequestTokenizer]:
    makers = {
        "qwen": tiny_models.digit_tokenizer,
        "llama": tiny_models.sentencepiece_tokenizer,
        "gpt_neox": tiny_models.whole_number_tokenizer,
    }
    return {name: RequestTokenizer.wrap(make()) for name, make in makers.items()}


@pytest.fixture
def qwen(tokenizers: dict[str, RequestTokenizer]) -> RequestTokenizer:
    return tokenizers["qwen"]


def tokenize(tokenizer: RequestTokenizer, **sequence: Any) -> TokenizedSequence:
    if not {"messages", "prompt", "prompt_token_ids"} & sequence.keys():
        sequence["prompt"] = "the quick"
    return tokenizer.tokenize(SequenceRequest(**sequence))


def completion_ids(tokenizer: RequestTokenizer, **sequence: Any) -> list[int]:
    return tokenize(tokenizer, **sequence).completion.token_ids.tolist()


def error_of(tokenizer: RequestTokenizer, **sequence: Any) -> TeacherError:
    with pytest.raises(TeacherError) as caught:
        tokenize(tokenizer, **sequence)
    return caught.value


@pytest.mark.parametrize(
    "field",
    [
        lambda text: {"prompt": text, "completion": "x"},
        lambda text: {"messages": [{"role": "user", "content": text}], "completion": "x"},
        lambda text: {"prompt": "x", "completion": text},
        lambda text: {"prompt": "x", "completion": [text[: len(text) // 2]] * 2},
    ],
)
@pytest.mark.parametrize(
    "text", ["a" * 9000, "the quick 12 " * 700, "\u00e9\u4e2d\U0001f600" * 900]
)
def test_far_too_long_text_is_rejected_before_it_is_tokenized(
    tokenizers: dict[str, RequestTokenizer],
    field: Any,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_tokenizer, "_LONG_CHARACTERS", 100)
    monkeypatch.setattr(request_tokenizer, "_PIECE_CHARACTERS", 100)
    for tokenizer in tokenizers.values():
        sequence = SequenceRequest(**field(text))
        tokens = tokenizer.tokenize(sequence)
        most = max(len(tokens.prompt_ids), len(tokens.completion))
        assert len(tokenizer.tokenize(sequence, max_tokens=most).token_ids) == len(tokens.token_ids)
        with monkeypatch.context() as patched:
            patched.delattr(RequestTokenizer, "_prompt_ids")  # where tokenization begins
            with pytest.raises(TeacherError) as caught:
                tokenizer.tokenize(sequence, max_tokens=most // 4)
        assert (caught.value.status, caught.value.key) == (413, "max_model_len")


def test_too_many_ids_are_rejected_before_they_are_validated(qwen: RequestTokenizer) -> None:
    for field in ("prompt_token_ids", "completion_token_ids"):
        ids = {"prompt_token_ids": [1], "completion_token_ids": [1]} | {field: [10**9] * 11}
        with pytest.raises(TeacherError) as caught:
            qwen.tokenize(SequenceRequest(**ids), max_tokens=10)  # type: ignore[arg-type]
        assert caught.value.status == 413


def test_messages_are_rendered_with_the_generation_prompt_and_without_a_second_bos(
    tokenizers: dict[str, RequestTokenizer],
) -> None:
    for tokenizer in tokenizers.values():
        controls = tokenizer.table.controls
        ids = tokenize(tokenizer, messages=MESSAGES, completion="7").prompt_ids.tolist()
        assert (ids[0], ids[-1]) == (controls["<|user|>"], controls["<|assistant|>"])
        assert tokenizer.table.sequence(ids).text.strip() == b"3 + 4 ="


@pytest.mark.parametrize("prompt", ["the fox", "the </s> fox", "ends with </s>"])
def test_eos_added_by_the_tokenizer_is_removed_from_a_prompt(prompt: str) -> None:
    hugging_face = tiny_models.sentencepiece_tokenizer()
    ids = hugging_face(prompt, add_special_tokens=False).input_ids
    hugging_face.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert hugging_face(prompt).input_ids == [1, *ids, 2]
    tokenized = tokenize(RequestTokenizer.wrap(hugging_face), prompt=prompt, completion="7")
    assert tokenized.prompt_ids.tolist() == [1, *ids]


def test_bos_is_added_to_a_prompt_but_neither_to_messages_nor_to_a_completion() -> None:
    hugging_face = tiny_models.sentencepiece_tokenizer()
    hugging_face.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer = RequestTokenizer.wrap(hugging_face)
    plain = tokenize(tokenizer, prompt="the fox", completion="7")
    assert plain.prompt_ids.tolist() == hugging_face("the fox").input_ids
    assert plain.prompt_ids[0] == 1
    assert plain.completion.marks == {}
    chat = tokenize(tokenizer, messages=MESSAGES, completion="")
    assert 1 not in chat.prompt_ids.tolist()


def test_completion_bytes_are_preserved(tokenizers: dict[str, RequestTokenizer]) -> None:
    for tokenizer in tokenizers.values():
        for text in (" the fox", "the fox", "  7\n", "Grüße 🙂", ""):
            tokenized = tokenize(tokenizer, completion=text)
            assert tokenized.completion.text == text.encode()


def test_sentencepiece_adds_no_space_to_a_completion(
    tokenizers: dict[str, RequestTokenizer],
) -> None:
    tokenizer = tokenizers["llama"]
    without = tokenize(tokenizer, completion="fox").completion
    with_space = tokenize(tokenizer, completion=" fox").completion
    assert (without.text, with_space.text) == (b"fox", b" fox")
    assert without.token_ids.tolist() != with_space.token_ids.tolist()
    # The model has seen the space in front of a prompt in training.
    prompt_ids = tokenize(tokenizer, prompt="fox", completion="").prompt_ids
    assert prompt_ids.tolist() == with_space.token_ids.tolist()


@pytest.mark.parametrize("text", ["<|end|>", "a<|end|>b", "<|user|>"])
def test_text_of_a_control_token_remains_text(qwen: RequestTokenizer, text: str) -> None:
    completion = tokenize(qwen, completion=text).completion
    assert (completion.text, completion.marks) == (text.encode(), {})


def test_control_tokens_are_inserted_between_texts(qwen: RequestTokenizer) -> None:
    parts = ["12", {"control": "<|user|>"}, " th", "e fox"]
    completion = tokenize(qwen, completion=parts).completion
    control = qwen.table.controls["<|user|>"]
    position = completion.token_ids.tolist().index(control)
    assert completion.marks == {position: "<|user|>"}
    assert completion.text == b"12 the fox"
    joined = completion_ids(qwen, completion=" the fox")
    assert completion.token_ids.tolist()[position + 1 :] == joined  # adjacent texts are joined


@pytest.mark.parametrize(
    ("sequence", "ids"),
    [
        ({"completion": "7"}, [27]),
        ({"completion_token_ids": [27]}, [27]),
        ({"completion": ""}, []),
    ],
)
def test_finished_appends_the_end_of_turn(
    qwen: RequestTokenizer, sequence: dict[str, Any], ids: list[int]
) -> None:
    completion = tokenize(qwen, finished=True, **sequence).completion
    end = qwen.table.roles.end_of_turn
    assert completion.token_ids.tolist() == [*ids, end]
    assert completion.ends_turn


def test_given_ids_are_unchanged_and_candidates_unique(qwen: RequestTokenizer) -> None:
    tokenized = tokenize(
        qwen,
        prompt_token_ids=[5, 0, 9],
        completion_token_ids=[300, 2],
        candidate_ids=[[4, 4, 9], []],
    )
    assert tokenized.prompt_ids.tolist() == [5, 0, 9]
    assert tokenized.completion.token_ids.tolist() == [300, 2]
    assert tokenized.candidate_ids is not None
    assert [row.tolist() for row in tokenized.candidate_ids] == [[4, 9], []]


def test_empty_prompt_becomes_bos_if_the_tokenizer_has_one(
    tokenizers: dict[str, RequestTokenizer],
) -> None:
    tokenizer = tokenizers["llama"]
    assert tokenize(tokenizer, prompt="", completion="a").prompt_ids.tolist() == [1]
    for error in (
        error_of(tokenizers["qwen"], prompt="", completion="a"),
        error_of(tokenizer, prompt_token_ids=[], completion="a"),
    ):
        assert (error.status, error.key) == (400, "prompt")


@pytest.mark.parametrize("foreign", [420, 10**30])
@pytest.mark.parametrize(
    ("field", "sequence"),
    [
        ("prompt_token_ids", {"completion": "a"}),
        ("completion_token_ids", {}),
        ("candidate_ids", {"completion": "7"}),
    ],
)
def test_id_outside_the_vocabulary_is_an_error(
    qwen: RequestTokenizer, field: str, sequence: dict[str, Any], foreign: int
) -> None:
    ids = [[foreign]] if field == "candidate_ids" else [3, foreign]
    error = error_of(qwen, **sequence, **{field: ids})
    assert (error.status, error.key) == (400, field)
    assert str(foreign) in str(error)
    assert "less than 420" in str(error)


@pytest.mark.parametrize(
    ("sequence", "status", "key", "numbers"),
    [
        (
            {"completion": "7", "finished": True, "candidate_ids": [[1], [1], [1]]},
            400,
            "candidate_ids",
            "found 3, expected 2",
        ),
        ({"completion_token_ids": [27, 0], "finished": True}, 400, "finished", "token 0"),
        (
            {"completion": ["7", {"control": "<|end|>"}], "finished": True},
            400,
            "finished",
            "token 0",
        ),
        ({"completion": [{"control": "<think>"}]}, 422, "completion", "<|assistant|>, <|end|>"),
    ],
)
def test_invalid_sequence_is_an_error_with_field_and_numbers(
    qwen: RequestTokenizer, sequence: dict[str, Any], status: int, key: str, numbers: str
) -> None:
    error = error_of(qwen, **sequence)
    assert (error.status, error.key) == (status, key)
    assert numbers in str(error)


@pytest.mark.parametrize(("field", "text"), [("prompt", "\ud800"), ("completion", "a\ud800")])
def test_lone_surrogate_is_an_error(qwen: RequestTokenizer, field: str, text: str) -> None:
    fields = {"prompt": "a", "completion": "", field: text}
    with pytest.raises(TeacherError) as caught:
        qwen.tokenize(SequenceRequest.model_construct(**fields))
    assert (caught.value.status, caught.value.key) == (400, field)


def test_messages_without_a_chat_template_are_an_error() -> None:
    hugging_face = tiny_models.digit_tokenizer()
    hugging_face.chat_template = None
    tokenizer = RequestTokenizer.wrap(hugging_face)
    assert not tokenizer.has_chat_template
    assert tokenizer.chat_template_hash is None
    error = error_of(tokenizer, messages=MESSAGES, completion="7")
    assert (error.status, error.key) == (422, "messages")


def test_roles_unsupported_by_the_template_are_an_error() -> None:
    hugging_face = tiny_models.digit_tokenizer()
    hugging_face.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        + tiny_models.CHAT_TEMPLATE
    )
    messages = [{"role": "system", "content": "be brief"}, *MESSAGES]
    error = error_of(RequestTokenizer.wrap(hugging_face), messages=messages, completion="7")
    assert (error.status, error.key) == (422, "messages")
    assert "system, user: no system here" in str(error)


def test_finished_without_an_end_of_turn_token_is_an_error() -> None:
    hugging_face = tiny_models.digit_tokenizer()
    hugging_face.chat_template = None
    hugging_face.eos_token = None
    error = error_of(RequestTokenizer.wrap(hugging_face), prompt="a", completion="b", finished=True)
    assert (error.status, error.key) == (422, "finished")


def test_template_that_cannot_render_a_conversation_is_a_config_error() -> None:
    hugging_face = tiny_models.digit_tokenizer()
    hugging_face.chat_template = "{{ raise_exception('only tools') }}"
    with pytest.raises(ConfigError) as caught:
        RequestTokenizer.wrap(hugging_face)
    assert caught.value.key == "chat_template"
    assert "only tools" in str(caught.value)


def test_tokenizer_whose_tokens_have_no_bytes_is_an_error() -> None:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    chat = PreTrainedTokenizerFast(tokenizer_object=words, name_or_path="my/model")
    with pytest.raises(TokenizerError) as caught:
        RequestTokenizer.wrap(chat)
    assert caught.value.key == "my/model"


def test_variables_reach_the_chat_template_and_no_other_argument() -> None:
    hugging_face = tiny_models.digit_tokenizer()
    hugging_face.chat_template += "{% if thinking %}{{ '<think>' }}{% endif %}"
    tokenizer = RequestTokenizer.wrap(hugging_face)
    messages = [{"role": "user", "content": "?"}]
    plain = tokenize(tokenizer, messages=messages, completion="!")
    thinking = tokenize(
        tokenizer, messages=messages, completion="!", chat_template_kwargs={"thinking": True}
    )
    rest = thinking.prompt_ids[len(plain.prompt_ids) :]
    assert tokenizer.table.sequence(rest).text == b"<think>"
    for sequence in (
        {"messages": messages, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"prompt": "?", "chat_template_kwargs": {"thinking": True}},
    ):
        with pytest.raises(ValidationError):
            SequenceRequest.model_validate({**sequence, "completion": "!"})


@pytest.mark.nightly  # a release of transformers may add names
def test_names_that_the_rendering_functions_have_are_reserved() -> None:
    functions = (
        PreTrainedTokenizerBase.apply_chat_template,
        render_jinja_template,
        jinja2.Template.render,
    )
    parameters = {
        name
        for function in functions
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not parameter.VAR_POSITIONAL
        and parameter.kind is not parameter.VAR_KEYWORD
    }
    assert {"self", "messages"} | parameters <= RESERVED_TEMPLATE_KEYS
    assert jinja2.defaults.DEFAULT_NAMESPACE.keys() <= RESERVED_TEMPLATE_KEYS


@pytest.mark.parametrize("name", sorted(RESERVED_TEMPLATE_KEYS))
def test_reserved_name_is_no_variable_of_a_template(name: str) -> None:
    sequence = {"messages": [{"role": "user", "content": "?"}], "completion": "!"}
    with pytest.raises(ValidationError) as caught:
        SequenceRequest.model_validate({**sequence, "chat_template_kwargs": {name: "value"}})
    assert caught.value.errors()[0]["loc"] == ("chat_template_kwargs",)
