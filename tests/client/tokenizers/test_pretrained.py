"""Tokenizers loaded by the client tokenize requests exactly as a mopd service does."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mopd_client.tokenizers.pretrained import PretrainedTokenizer, load_tokenizer
from mopd_client.tokenizers.sequence_tokens import sequence_tokens
from mopd_protocol.errors import ConfigError, DataError, MissingPackageError, TeacherError
from mopd_protocol.requests import ControlToken, SequenceRequest
from mopd_protocol.samples import Message
from mopd_server.scoring.tokenization import RequestTokenizer
from mopd_server.service_error import ServiceError
from tests import tiny_models
from tests.protocol.unicode_text import any_text

FAMILIES = {
    "digit": tiny_models.digit_tokenizer,
    "sentencepiece": tiny_models.sentencepiece_tokenizer,
    "whole number": tiny_models.whole_number_tokenizer,
}
USER = [{"role": "user", "content": "?"}]


def save(folder: Path, family: str = "digit", template: str | None = "") -> str:
    """Save a tokenizer; with its family's template if ``template`` is empty."""
    tokenizer = FAMILIES[family]()
    if template != "":
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_table_roles_and_template_hash_are_those_of_a_service(tmp_path, family):
    tokenizer = load_tokenizer(save(tmp_path, family))
    service = RequestTokenizer(AutoTokenizer.from_pretrained(tmp_path))

    assert tokenizer.table.fingerprint == service.table.fingerprint
    assert tokenizer.table.roles == service.table.roles
    assert tokenizer.table.controls == service.table.controls
    assert tokenizer.chat_template_hash == service.template_hash


def test_truncation_and_padding_are_disabled(tmp_path):
    wrapped = FAMILIES["digit"]()
    wrapped.backend_tokenizer.enable_truncation(2)
    wrapped.backend_tokenizer.enable_padding(length=100)
    wrapped.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    plain = FAMILIES["digit"]().backend_tokenizer.encode("a b c d", add_special_tokens=False)
    assert tokenizer.tokenizer.encode("a b c d", add_special_tokens=False).ids == plain.ids


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{% if messages|length < 2 %}{{ raise_exception('no ' + messages[0].role) }}{% endif %}",
    ],
)
def test_an_error_of_the_template_is_a_data_error(tmp_path, template):
    # The first two fail on any messages, so the end of the turn cannot be derived either.
    folder = save(tmp_path, template=template)
    if "length" not in template:
        with pytest.raises(ConfigError) as caught:
            load_tokenizer(folder)
        assert caught.value.key == "chat_template"
        return
    with pytest.raises(DataError, match="roles user: no user") as caught:
        load_tokenizer(folder).render(USER)
    assert caught.value.key == "messages"


def test_without_a_chat_template_messages_are_rejected(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path, template=None))
    assert not tokenizer.has_chat_template
    assert tokenizer.chat_template_hash is None

    request = SequenceRequest(messages=[Message(role="user", content="?")], completion="7")
    with pytest.raises(TeacherError) as caught:
        sequence_tokens("math", tokenizer, request)
    assert (caught.value.status, caught.value.key) == (422, "messages")


@pytest.mark.parametrize("source", ["/no/such/folder", "./none", "name"])
def test_an_unknown_source_raises(source):
    with pytest.raises(ConfigError, match=source) as caught:
        load_tokenizer(source)
    assert caught.value.key == "tokenizer"


@pytest.mark.parametrize("text", [None, "{}"])
def test_a_folder_without_a_valid_tokenizer_raises(tmp_path, text):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.key == "tokenizer"


def test_without_transformers_the_error_names_the_package(tmp_path, monkeypatch):
    folder = save(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingPackageError) as caught:
        load_tokenizer(folder)
    assert caught.value.key == "transformers"


PAIRS = {
    family: (PretrainedTokenizer.wrap(make()), RequestTokenizer(make()))
    for family, make in FAMILIES.items()
}
names = st.sampled_from(["<|user|>", "<|end|>", "</s>", "<s>", "<|none|>"])
parts = st.lists(st.one_of(any_text, names.map(lambda n: ControlToken(control=n))))


@st.composite
def sequences(draw) -> SequenceRequest:
    """Valid sequences, and sequences that a service rejects."""
    ids = st.lists(st.integers(0, 700), max_size=4)
    texts = st.one_of(any_text, st.just("half \ud83d"))
    prompt = draw(
        st.one_of(
            texts.map(lambda text: {"prompt": text}),
            ids.map(lambda token_ids: {"prompt_token_ids": token_ids}),
            texts.map(lambda text: {"messages": [Message(role="user", content=text)]}),
        )
    )
    completion = draw(
        st.one_of(
            st.one_of(texts, parts).map(lambda text: {"completion": text}),
            ids.map(lambda token_ids: {"completion_token_ids": token_ids}),
        )
    )
    return SequenceRequest(**prompt, **completion, finished=draw(st.booleans()))


@pytest.mark.parametrize("family", FAMILIES)
@given(sequence=sequences())
@settings(deadline=None)
def test_a_sequence_has_the_tokens_of_a_service(family, sequence):
    tokenizer, service = PAIRS[family]
    try:
        expected = service.tokenize(sequence)
    except ServiceError:
        with pytest.raises(TeacherError) as caught:
            sequence_tokens("math", tokenizer, sequence)
        assert caught.value.status in (400, 422)
        return
    tokens = sequence_tokens("math", tokenizer, sequence)
    assert tokens.prompt_ids == expected.prompt_ids.tolist()
    assert tokens.completion.token_ids.tolist() == expected.completion.token_ids.tolist()
    assert tokens.completion.text == expected.completion.text
    assert tokens.completion.marks == expected.completion.marks
