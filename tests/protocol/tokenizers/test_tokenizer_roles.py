"""Roles of tokens: the end of turn is derived from the chat template."""

import pytest
from transformers import PreTrainedTokenizerFast

from mopd_protocol.errors import DataError
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN
from mopd_protocol.tokenizers.token_table import TokenRoles, TokenTable
from mopd_protocol.tokenizers.tokenizer_roles import roles_of
from tests import tiny_models


def turns(suffix: str) -> str:
    """Return a template that ends each message with ``suffix``."""
    return (
        "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
        + suffix
        + "{% endfor %}"
    )


def controls_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {
        token.content: token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }


def with_template(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = tiny_models.whole_number_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    "template",
    [turns("<|im_end|>"), turns("<|im_end|>\n"), turns("\n<|im_end|>"), turns(" <|im_end|> ")],
)
def test_the_end_of_turn_is_the_token_after_an_assistant_message(template):
    tokenizer = with_template(template)

    roles = roles_of(tokenizer, controls_of(tokenizer))

    assert roles.end_of_turn == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert roles.eos == tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_an_end_of_turn_with_id_zero_is_found():
    tokenizer = with_template(turns("<|im_end|>"))

    assert roles_of(tokenizer, controls_of(tokenizer)).end_of_turn == 0


def test_of_two_control_tokens_with_one_prefix_the_longer_one_is_matched():
    tokenizer = with_template(turns("<|im_end|>x"))

    roles = roles_of(tokenizer, {"<|im_end|>": 3, "<|im_end|>x": 8})

    assert roles.end_of_turn == 8


@pytest.mark.parametrize("template", [None, turns(""), turns("\n### Next")])
def test_without_a_control_token_after_the_message_the_end_of_text_ends_the_turn(template):
    tokenizer = with_template(template)

    roles = roles_of(tokenizer, controls_of(tokenizer))

    assert roles.end_of_turn == roles.eos == tokenizer.convert_tokens_to_ids("<|endoftext|>")


@pytest.mark.parametrize(
    ("make", "begin", "end", "pad"),
    [
        (tiny_models.digit_tokenizer, None, "<|end|>", "<|pad|>"),
        (tiny_models.whole_number_tokenizer, None, "<|im_end|>", "<|endoftext|>"),
        (tiny_models.sentencepiece_tokenizer, "<s>", "</s>", None),
    ],
)
def test_roles_are_ids_of_the_tokens_that_the_tokenizer_names(make, begin, end, pad):
    tokenizer = make()
    roles = roles_of(tokenizer, controls_of(tokenizer))

    role_ids = [roles.bos, roles.end_of_turn, roles.pad]
    named = [None if role is None else tokenizer.convert_ids_to_tokens(role) for role in role_ids]
    assert named == [begin, end, pad]


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        ((), ["<|im_end|>", "<|endoftext|>"]),
        (("<|endoftext|>", "<|user|>"), ["<|im_end|>", "<|endoftext|>", "<|user|>"]),
        (("<|user|>", "<|system|>"), ["<|im_end|>", "<|endoftext|>", "<|system|>", "<|user|>"]),
        (("the", "<|im_end|>"), ["<|im_end|>", "<|endoftext|>"]),  # of another tokenizer
    ],
)
def test_generation_settings_add_control_tokens_that_end(published, expected):
    tokenizer = with_template(turns("<|im_end|>"))
    ends = tokenizer.convert_tokens_to_ids([*published])
    roles = roles_of(tokenizer, controls_of(tokenizer), ends)
    assert tokenizer.convert_ids_to_tokens([*roles.ending]) == expected
    table = TokenTable.from_tokenizer(tokenizer.backend_tokenizer, roles)
    assert {table.marks[token_id] for token_id in roles.ending} == {END_OF_TURN}
    assert TokenRoles.model_validate_json(roles.model_dump_json()) == roles


def test_a_beginning_of_text_is_no_end():
    tokenizer = tiny_models.sentencepiece_tokenizer()
    roles = roles_of(tokenizer, controls_of(tokenizer), [tokenizer.bos_token_id])
    assert roles.ending == (tokenizer.eos_token_id,)


def test_roles_without_further_ends_are_serialized_as_before_there_were_any():
    assert TokenRoles(eos=1, pad=1).model_dump() == {
        "bos": None,
        "eos": 1,
        "end_of_turn": None,
        "pad": 1,
    }


def test_an_end_outside_the_vocabulary_is_rejected():
    tokenizer = tiny_models.digit_tokenizer().backend_tokenizer
    with pytest.raises(DataError, match="other_ends"):
        TokenTable.from_tokenizer(tokenizer, TokenRoles(eos=0, other_ends=(10_000,)))
