"""A model's tokenizer files, read without transformers, say what transformers says."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mopd_client.tokenizers.chat_template import ChatTemplate
from mopd_client.tokenizers.folder import FolderTokenizer, read_folder_tokenizer
from mopd_client.tokenizers.sequence_tokens import sequence_tokens
from mopd_protocol.errors import ConfigError, DataError, TeacherError
from mopd_protocol.requests import ControlToken, SequenceRequest
from mopd_protocol.samples import Message
from mopd_server.scoring.tokenization import RequestTokenizer as TeacherTokenizer
from mopd_server.service_error import ServiceError
from tests import tiny_models
from tests.protocol.unicode_text import any_text

FAMILIES = {
    "digit": tiny_models.digit_tokenizer,
    "sentencepiece": tiny_models.sentencepiece_tokenizer,
    "whole number": tiny_models.whole_number_tokenizer,
}
MESSAGES = [
    {"role": "system", "content": 'be "brief" & kind'},
    {"role": "user", "content": "3 < 4?\n"},
    {"role": "assistant", "content": "  yes 的 \u2028"},
    {"role": "user", "content": ""},
]

#: What published templates are made of.
TEMPLATES = {
    "roles": tiny_models.CHAT_TEMPLATE,
    "trimmed blocks": """{% for message in messages %}
    {% if message.role == 'user' %}
  [{{ message.content }}]
    {% endif %}
{% endfor %}
end {{ eos_token }}
""",
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ loop.index }}{{ m['content'] | trim }}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% endfor %}"
    ),
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "namespaces": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{{ messages | map(attribute='role') | list | join('/') }}"
    ),
    "generation blocks": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "absent things": (
        "{{ tools is none }}{{ documents is none }}{{ bos_token is defined }}"
        "{{ nothing is defined }}{{ add_generation_prompt }}{{ custom_token is defined }}"
    ),
    "dates": "{{ strftime_now('%Y') }}",
    "macros": (
        "{% macro turn(m) -%}<{{ m.role }}>{{ m.content[:3] }}{%- endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{% endfor %}{{ dict(a=1) }}"
    ),
}


def saved(folder: Path, family: str = "digit", template: str | None = None) -> Path:
    """A folder as transformers writes it."""
    tokenizer = FAMILIES[family]()
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_rendered_as_transformers_renders_it(tmp_path, name, generation):
    folder = saved(tmp_path, template=TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = read_folder_tokenizer(str(folder))

    for messages in (MESSAGES, MESSAGES[1:2]):
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation
        )
        assert ours.apply_chat_template(messages, add_generation_prompt=generation) == expected


def test_a_template_may_refuse_messages():
    template = ChatTemplate("{{ raise_exception('no ' + messages[0].role) }}", {})
    with pytest.raises(DataError, match=r"refuses messages with the roles system.*: no system"):
        template.render(MESSAGES[:1], add_generation_prompt=True)
    with pytest.raises(DataError, match="refuses messages with the roles user"):
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render(
            MESSAGES[1:2], add_generation_prompt=True
        )


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_stays_in_its_sandbox(attack):
    with pytest.raises(DataError):
        ChatTemplate(attack, {}).render(MESSAGES, add_generation_prompt=True)


def test_a_template_cannot_change_the_messages_of_its_caller():
    messages = [dict(message) for message in MESSAGES]
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}", {})
    template.render(messages, add_generation_prompt=True)
    assert messages == MESSAGES


def test_a_text_that_is_no_template_is_refused():
    with pytest.raises(ConfigError, match="the chat template cannot be read"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_roles_and_template_are_those_of_a_service(tmp_path, family):
    ours = read_folder_tokenizer(str(saved(tmp_path, family)))
    service = TeacherTokenizer(AutoTokenizer.from_pretrained(tmp_path))

    assert ours.table.fingerprint == service.table.fingerprint
    assert ours.table.roles == service.table.roles
    assert ours.table.controls == service.table.controls
    assert ours.chat_template_hash == service.template_hash


def layouts(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = (folder / "chat_template.jinja").read_text()
    for name in ("eos_token", "pad_token"):
        config.pop(name)
    tokens: dict[str, Any] = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    objects = {
        name: {"__type": "AddedToken", "content": token, "lstrip": False, "normalized": False}
        for name, token in tokens.items()
    }
    legacy = {**config, "eos_token": "<|user|>", "chat_template": template}
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    added = {"0": {"content": "<|end|>", "lstrip": False, "normalized": False, "special": True}}
    return {
        "template in the config": ({**config, **tokens, "chat_template": template}, None, None),
        "several templates": ({**config, **tokens, "chat_template": several}, None, None),
        "a file before the config": ({**config, **tokens, "chat_template": "x"}, template, None),
        "tokens as objects": ({**config, **objects}, template, None),
        "an older map of tokens": (legacy, None, tokens),
        "a map that is out of date": (
            {**config, **tokens, "added_tokens_decoder": added},
            template,
            {"eos_token": "<|user|>"},
        ),
    }


LAYOUTS = (
    "template in the config",
    "several templates",
    "a file before the config",
    "tokens as objects",
    "an older map of tokens",
    "a map that is out of date",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_files_is_read(tmp_path, layout):
    config, template, named = layouts(saved(tmp_path))[layout]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    if named is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = read_folder_tokenizer(str(tmp_path))

    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.pad_token_id == theirs.pad_token_id
    rendered = ours.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert rendered == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    assert ours.table.roles.end_of_turn == 0


def test_a_tokenizer_without_a_template_takes_no_messages(tmp_path):
    saved(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    ours = read_folder_tokenizer(str(tmp_path))
    assert ours.template is None
    assert ours.chat_template_hash is None

    request = SequenceRequest(messages=[Message(role="user", content="?")], completion="7")
    with pytest.raises(TeacherError, match="no chat template, so it cannot take messages") as told:
        sequence_tokens("math", ours, request)
    assert told.value.status == 422


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/folder", "there is no tokenizer folder '/no/such/folder'"),
        ("./none", "there is no tokenizer folder"),
        ("name", "there is no tokenizer folder 'name'; expected a folder or a hub id"),
    ],
)
def test_a_source_that_is_no_folder_is_refused(source, message):
    with pytest.raises(ConfigError, match=message):
        read_folder_tokenizer(source)


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        read_folder_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no fast tokenizer"):
        FolderTokenizer({"tokenizer.json": "{}"})
    text = FAMILIES["digit"]().backend_tokenizer.to_str()
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not JSON"):
        FolderTokenizer({"tokenizer.json": text, "tokenizer_config.json": "{"})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is a list"):
        FolderTokenizer({"tokenizer.json": text, "tokenizer_config.json": "[]"})


def pair(family: str) -> tuple[FolderTokenizer, TeacherTokenizer]:
    wrapped: PreTrainedTokenizerFast = FAMILIES[family]()
    names = {f"{n}_token": getattr(wrapped, f"{n}_token") for n in ("bos", "eos", "unk", "pad")}
    config = {
        "chat_template": wrapped.chat_template,
        **{name: token for name, token in names.items() if token is not None},
    }
    texts = {
        "tokenizer.json": wrapped.backend_tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config),
    }
    return FolderTokenizer(texts), TeacherTokenizer(wrapped)


PAIRS = {family: pair(family) for family in FAMILIES}
names = st.sampled_from(["<|user|>", "<|end|>", "</s>", "<s>", "<|none|>"])
parts = st.lists(st.one_of(any_text, names.map(lambda n: ControlToken(control=n))))


@st.composite
def sequences(draw) -> SequenceRequest:
    """Requests, among them those that a service refuses."""
    ids = st.lists(st.integers(0, 700), max_size=4)
    texts = st.one_of(any_text, st.just("half \ud83d"))
    prompt = draw(
        st.one_of(
            texts.map(lambda text: {"prompt": text}),
            ids.map(lambda found: {"prompt_token_ids": found}),
            texts.map(lambda text: {"messages": [Message(role="user", content=text)]}),
        )
    )
    completion = draw(
        st.one_of(
            st.one_of(texts, parts).map(lambda text: {"completion": text}),
            ids.map(lambda found: {"completion_token_ids": found}),
        )
    )
    return SequenceRequest(**prompt, **completion, finished=draw(st.booleans()))


@pytest.mark.parametrize("family", FAMILIES)
@given(sequence=sequences())
@settings(deadline=None)
def test_a_sequence_becomes_the_tokens_that_a_service_makes_of_it(family, sequence):
    ours, service = PAIRS[family]
    try:
        expected = service.tokenize(sequence)
    except ServiceError:
        with pytest.raises(TeacherError) as told:
            sequence_tokens("math", ours, sequence)
        assert told.value.status in (400, 422)
        return
    found = sequence_tokens("math", ours, sequence)
    assert found.prompt_ids == expected.prompt_ids.tolist()
    assert found.completion.token_ids.tolist() == expected.completion.token_ids.tolist()
    assert found.completion.text == expected.completion.text
    assert found.completion.marks == expected.completion.marks
