"""Students on disk: what is saved is an ordinary model folder, and comes back bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.hub import cached_file

from mopd_client.tokenizers.pretrained import load_tokenizer
from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.samples import Message
from mopd_protocol.tokenizers.published_ends import published_ends
from mopd_server.scoring.tokenizer_loading import ServedTokenizer
from mopd_server.settings import TeacherSettings
from mopd_trainer.config.run import RolloutConfig, StudentConfig
from mopd_trainer.run_folder.checkpoint import save_student
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.student.student import Student
from tests import tiny_models
from tests.trainer.students import (
    CPU,
    FAMILIES,
    MESSAGES,
    encoder,
    model_of,
    student_of,
    tokenizer,
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_bit_for_bit(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model = model_of(family).to(dtype)
    student = Student(model, tokenizer(FAMILIES[family][1]), CPU)
    student.save(tmp_path)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    student.load_weights(tmp_path)
    for name, weight in model.state_dict().items():
        assert weight.dtype == before[name].dtype
        assert torch.equal(weight, before[name]), name


def test_a_saved_student_is_an_ordinary_model_folder(tmp_path: Path) -> None:
    student = student_of()
    student.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    weights = student.model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    messages = [message.model_dump() for message in MESSAGES]
    text = loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert loaded(text, add_special_tokens=False)["input_ids"] == student.prompt_token_ids(MESSAGES)


@pytest.mark.parametrize(
    "published",
    [
        {"do_sample": True, "repetition_penalty": 1.3, "top_k": 20},
        {"temperature": 0.6},  # without do_sample: some are published so, and transformers balks
    ],
)
def test_the_published_generation_settings_are_saved_as_they_were(
    tmp_path: Path, published: dict[str, float]
) -> None:
    model = model_of("qwen")
    model.generation_config = GenerationConfig(**published)
    student = Student(model, tokenizer("digit"), CPU)
    for folder in (tmp_path / "first", tmp_path / "second"):
        student.save(folder)
        saved = json.loads((folder / "generation_config.json").read_text())
        assert {key: saved[key] for key in published} == published


def test_an_identity_read_without_weights_is_that_of_the_loaded_model(tmp_path: Path) -> None:
    tiny_models.save(model_of("llama"), tokenizer("sentencepiece"), tmp_path)
    config = StudentConfig(model=str(tmp_path), device="cpu")
    read, loaded = StudentIdentity.read(config), Student.load(config).identity
    assert read.table.fingerprint == loaded.table.fingerprint
    assert (read.logit_width, read.parameters) == (loaded.logit_width, loaded.parameters)
    assert read.logit_width > read.table.size


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (["<|pad|>", "<|end|>"], ["<|end|>", "<|pad|>"]),
        ("<|user|>", ["<|end|>", "<|user|>"]),
        (None, ["<|end|>"]),
        ("7", ["<|end|>"]),  # a token of text: the settings are of another tokenizer
    ],
)
def test_what_ends_a_completion_is_the_same_wherever_it_is_read(
    tmp_path: Path, published: str | list[str] | None, expected: list[str]
) -> None:
    own = tokenizer("digit")
    folder = tiny_models.save(model_of("qwen"), own, tmp_path / "published")
    ids = None if published is None else own.convert_tokens_to_ids(published)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    config = StudentConfig(model=str(folder), device="cpu")
    student = Student.load(config)
    ends = tuple(own.convert_tokens_to_ids(expected))
    settings = TeacherSettings(model=str(folder), name="math")
    tables = {
        "loaded": student.identity.table,
        "read": StudentIdentity.read(config).table,
        "copied": student.copy().table,
        "served": ServedTokenizer.read(settings).requests.table,
        "local": load_tokenizer(str(folder)).table,
    }
    assert {name: each.roles.ending for name, each in tables.items()} == dict.fromkeys(tables, ends)
    student.save(tmp_path / "final")
    assert {*published_ends(cached_file, str(tmp_path / "final"))} == {*ends}
    saved = GenerationConfig.from_pretrained(tmp_path / "final").eos_token_id
    assert saved == ([*ends] if ends[1:] else ends[0]) or {*saved} == {*ends}
    reloaded = Student.load(StudentConfig(model=str(tmp_path / "final"), device="cpu"))
    assert reloaded.table.roles == student.table.roles


def test_generation_stops_at_every_end() -> None:
    model = model_of("qwen")
    model.generation_config.eos_token_id = [0, 1]
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # every id is equally likely
    student = Student(model, tokenizer("digit"), CPU)
    settings = RolloutConfig(max_new_tokens=200)
    prompts = [student.prompt_token_ids(MESSAGES)] * 32
    generations = student.generate(prompts, settings, seed=0)
    last = {each.token_ids[-1] for each in generations if len(each.token_ids) < 200}
    assert last == {0, 1}
    assert not any({0, 1} & {*each.token_ids[:-1]} for each in generations)


def test_the_text_encoder_is_built_on_first_use() -> None:
    identity = student_of().identity
    assert "encoder" not in vars(identity)
    built = identity.encoder
    assert built.encode("3 + 4") == encoder("digit").encode("3 + 4")
    assert identity.encoder is built


def test_a_folder_without_a_model_raises_a_config_error(tmp_path: Path) -> None:
    for folder, problem in ((tmp_path / "none", "not found"), (tmp_path, "cannot be loaded")):
        with pytest.raises(ConfigError, match=problem) as caught:
            Student.load(StudentConfig(model=str(folder), device="cpu"))
        assert caught.value.key == "student.model"
        assert "\n" not in str(caught.value)


def test_a_student_without_a_chat_template_raises_a_config_error(tmp_path: Path) -> None:
    bare = tiny_models.digit_tokenizer()
    bare.chat_template = None
    tiny_models.save(model_of("qwen"), bare, tmp_path)
    with pytest.raises(ConfigError, match="no chat template") as caught:
        Student.load(StudentConfig(model=str(tmp_path), device="cpu"))
    assert caught.value.key == "student.model"


def test_a_chat_template_without_assistant_raises_a_config_error() -> None:
    own = tiny_models.digit_tokenizer()
    own.chat_template = "{{ raise_exception('not today') }}"
    with pytest.raises(ConfigError, match="not today") as caught:
        Student(model_of("qwen"), own, CPU)
    assert caught.value.key == "student.model"


def test_the_error_lists_the_roles_of_rejected_messages() -> None:
    own = tiny_models.digit_tokenizer()
    own.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + str(own.chat_template)
    )
    student = Student(model_of("qwen"), own, CPU)
    assert student.prompt_token_ids(MESSAGES)
    turns = (Message(role="system", content="be brief"), *MESSAGES)
    with pytest.raises(DataError, match="system, user: no system"):
        student.prompt_token_ids(turns)


def test_a_variable_that_the_template_cannot_use_is_an_error_of_the_data(tmp_path: Path) -> None:
    own = tiny_models.digit_tokenizer()
    own.chat_template += "{% if effort %}{{ 1 + effort }}{% endif %}"
    tiny_models.save(model_of("qwen"), own, tmp_path)
    config = StudentConfig(model=str(tmp_path), chat_template_kwargs={"effort": "high"})
    with pytest.raises(DataError, match="effort") as caught:
        StudentIdentity.read(config).prompt_token_ids(MESSAGES)
    assert caught.value.key == "student.model"


def test_an_unavailable_device_raises_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Student.load(StudentConfig(model=str(tmp_path), device="warp"))
    assert caught.value.key == "student.device"


@pytest.mark.parametrize(("chosen", "saved"), [("auto", "bfloat16"), ("float16", "float16")])
@pytest.mark.parametrize("family", ["qwen", "llama"])  # llama has a tied head
def test_the_trained_model_has_the_published_precision(
    tmp_path: Path, family: str, chosen: str, saved: str
) -> None:
    model = model_of(family).to(torch.bfloat16)
    tiny_models.save(model, tokenizer(FAMILIES[family][1]), tmp_path / "published")
    config = StudentConfig.model_validate(
        {"model": str(tmp_path / "published"), "device": "cpu", "final_dtype": chosen}
    )
    student = Student.load(config)
    save_student(student, tmp_path / "final", student.final_dtype)
    weights = load_file(tmp_path / "final" / "model.safetensors")
    assert {str(weight.dtype) for weight in weights.values()} == {f"torch.{saved}"}
    loaded = Student.load(config.model_copy(update={"model": str(tmp_path / "final")}))
    assert str(loaded.final_dtype) == f"torch.{'float16' if chosen == 'float16' else saved}"
    for name, weight in student.model.state_dict().items():
        assert weight.dtype == torch.float32
        assert chosen != "auto" or torch.equal(loaded.model.state_dict()[name], weight)


def test_variables_of_the_chat_template_change_the_prompt(tmp_path: Path) -> None:
    own = tiny_models.digit_tokenizer()
    own.chat_template += "{% if thinking %}{{ '<think>' }}{% endif %}"
    tiny_models.save(model_of("qwen"), own, tmp_path)
    config = StudentConfig(model=str(tmp_path), device="cpu")
    plain = Student.load(config).prompt_token_ids(MESSAGES)
    config = config.model_copy(update={"chat_template_kwargs": {"thinking": True}})
    student = Student.load(config)
    for each in (student, student.copy(), StudentIdentity.read(config)):
        ids = each.prompt_token_ids(MESSAGES)
        assert student.table.sequence(ids[len(plain) :]).text == b"<think>"
