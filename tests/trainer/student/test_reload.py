"""Saved folders reload in transformers as the tokenizer that the student was trained with."""

import asyncio
import json
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from mopd_client.tokenizers.pretrained import load_tokenizer as load_local_tokenizer
from mopd_protocol.errors import ConfigError
from mopd_protocol.samples import Message
from mopd_protocol.tokenizers import pretrained
from mopd_protocol.tokenizers.tokenizer_file import fingerprint, tokenizer_json
from mopd_server.scoring.tokenizer_loading import load_tokenizer as load_teacher_tokenizer
from mopd_server.settings import TeacherSettings
from mopd_trainer.config.run import RolloutConfig, RunConfig, StudentConfig
from mopd_trainer.diagnostics.templates import check_tokenizer
from mopd_trainer.launch.preflight import check_run
from mopd_trainer.loop import train
from mopd_trainer.run_folder.checkpoint import save_student
from mopd_trainer.run_folder.merge import merge
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.student.student import Student
from tests.tokenizer_families import FAMILIES, TEXTS, model_of, save_tokenizer
from tests.trainer.lora_students import LORA
from tests.trainer.runs import run_values, write_lines
from tests.trainer.students import MESSAGES
from tests.trainer.whole_runs import run_here

#: Another kind of tokenizer per family: of another alphabet, or of other words.
FOREIGN = {
    "llama2": "qwen2",
    "llama3": "gpt2",
    "mistral": "gemma",
    "qwen2": "gpt_neox",
    "qwen3": "llama3",
    "gemma": "llama2",
    "phi": "smollm",
    "gpt2": "mistral",
    "gpt_neox": "phi",
    "smollm": "qwen3",
}


def published(family: str, tokenizer: str, folder: Path, class_name: str | None = None) -> Path:
    """Publish a model of a family with the tokenizer of a family, by default under its class."""
    save_tokenizer(tokenizer, folder, class_name or FAMILIES[tokenizer].class_name)
    exact: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    torch.manual_seed(0)
    model = model_of(family, exact)
    model.generation_config = GenerationConfig(
        temperature=0.6, do_sample=True, top_k=20, eos_token_id=exact.eos_token_id
    )
    model.save_pretrained(folder)
    return folder


def config_of(folder: Path, **settings: Any) -> StudentConfig:
    """Settings of a student on the CPU."""
    return StudentConfig.model_validate({"model": str(folder), "device": "cpu", **settings})


def ids(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of all texts, with and without the tokens that a post-processor adds."""
    return [
        tokenizer.encode(text, add_special_tokens=added).ids
        for text in TEXTS
        for added in (True, False)
    ]


def assert_reloads(folder: Path, source: Path, **options: Any) -> Any:
    """Compare the tokenizer that transformers loads with the files of the published model."""
    loaded: Any = AutoTokenizer.from_pretrained(folder, **options)
    assert_same_tokenizer(loaded, source)
    return loaded


def assert_same_tokenizer(loaded: Any, source: Path) -> None:
    """Compare a tokenizer with the files of the published model."""
    file = Tokenizer.from_file(str(source / "tokenizer.json"))
    assert fingerprint(tokenizer_json(loaded.backend_tokenizer)) == fingerprint(
        tokenizer_json(file)
    )
    assert ids(loaded.backend_tokenizer) == ids(file)
    assert loaded.chat_template == (source / "chat_template.jinja").read_text()
    names = json.loads((source / "tokenizer_config.json").read_text())
    for name, token in loaded.special_tokens_map.items():
        assert names.get(name, token) == token
    added = {token["content"]: token["id"] for token in tokenizer_json(file)["added_tokens"]}
    assert loaded.get_added_vocab() == added


def saved(source: Path, folder: Path, **settings: Any) -> StudentIdentity:
    """Save the student of a published model, without its weights."""
    student = StudentIdentity.read(config_of(source, **settings))
    student.tokenizer_files.require_reloadable()
    student.model_config.save_pretrained(folder)
    student.tokenizer_files.write(folder)
    return student


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_reloads_with_its_own_and_with_a_foreign_tokenizer(
    family: str, tmp_path: Path
) -> None:
    for name in (family, FOREIGN[family]):
        source, folder = published(family, name, tmp_path / name), tmp_path / f"{name}-saved"
        student = saved(source, folder)
        loaded = assert_reloads(folder, source)
        prompt = loaded.apply_chat_template(
            [message.model_dump() for message in MESSAGES], add_generation_prompt=True
        )["input_ids"]
        assert prompt == student.prompt_token_ids(MESSAGES)
        assert_reloads(folder, source, trust_remote_code=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tokenizer_reloads_in_every_family(family: str, tmp_path: Path) -> None:
    for name in FAMILIES:
        source = published(family, name, tmp_path / name)
        for class_name in (None, FAMILIES[family].class_name, "PreTrainedTokenizerFast"):
            save_tokenizer(name, source, class_name)
            folder = tmp_path / f"{name}-{class_name}"
            saved(source, folder)
            assert_reloads(folder, source)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_saved_folder_is_saved_again_as_the_same_tokenizer(trusted: bool, tmp_path: Path) -> None:
    source = published("qwen2", "gpt_neox", tmp_path / "published")
    folders = [source, *(tmp_path / name for name in ("first", "second", "third"))]
    for folder, following in pairwise(folders):
        saved(folder, following, trust_remote_code=trusted)
        assert_reloads(following, source)
        assert_reloads(following, source, trust_remote_code=True)


def test_a_folder_that_reloads_right_is_saved_as_transformers_saves_it(tmp_path: Path) -> None:
    for family in ("qwen2", "qwen3", "gemma", "smollm"):
        source = published(family, family, tmp_path / family)
        student = Student.load(config_of(source))
        student.save(tmp_path / "saved")
        student.tokenizer.save_pretrained(tmp_path / "plain")
        for path in (tmp_path / "plain").iterdir():
            assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()
        assert not list((tmp_path / "saved").glob("*.py"))


def test_greedy_completions_of_the_reloaded_folder_are_those_of_the_student(
    tmp_path: Path,
) -> None:
    source = published("qwen2", "gpt_neox", tmp_path / "published")
    student = Student.load(config_of(source))
    folder = save_student(student, tmp_path / "final")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    loaded: Any = AutoTokenizer.from_pretrained(folder)
    settings = RolloutConfig(temperature=0.0, max_new_tokens=12)
    for text in TEXTS:
        message = Message(role="user", content=text)
        inputs = loaded.apply_chat_template(
            [message.model_dump()],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0].tolist()
        prompt = student.prompt_token_ids([message])
        completion = student.generate([prompt], settings, seed=0)[0]
        assert prompt + completion.token_ids == output


def test_named_chat_templates_and_changed_tokens_are_saved(tmp_path: Path) -> None:
    source = published("qwen2", "llama3", tmp_path / "published")
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(source)
    tokenizer.add_tokens(["<|tool|>"])
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tools": "{{ messages }}"}
    model: Any = AutoModelForCausalLM.from_pretrained(source)
    folder = save_student(Student(model, tokenizer, torch.device("cpu")), tmp_path / "final")
    loaded: Any = AutoTokenizer.from_pretrained(folder)
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.get_added_vocab() == tokenizer.get_added_vocab()
    assert loaded("a<|tool|>b")["input_ids"] == tokenizer("a<|tool|>b")["input_ids"]


def test_a_class_of_transformers_with_changed_steps_is_saved_as_the_generic_one(
    tmp_path: Path,
) -> None:
    source = published("gpt2", "gpt2", tmp_path / "published", "GPT2Tokenizer")
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    tokenizer.backend_tokenizer.pre_tokenizer = PreTrainedTokenizerFast.from_pretrained(
        published("gpt2", "smollm", tmp_path / "other")
    ).backend_tokenizer.pre_tokenizer
    model: Any = AutoModelForCausalLM.from_pretrained(source)
    folder = save_student(Student(model, tokenizer, torch.device("cpu")), tmp_path / "final")
    loaded: Any = AutoTokenizer.from_pretrained(folder)
    assert loaded(TEXTS[0])["input_ids"] == tokenizer(TEXTS[0])["input_ids"]


def test_a_published_post_processor_is_kept(tmp_path: Path) -> None:
    """GPT-NeoX's class replaces it; its other steps are those of the file."""
    source = published("gpt_neox", "gpt_neox", tmp_path / "published")
    path = source / "tokenizer.json"
    file = Tokenizer.from_file(str(path))
    end = "<|endoftext|>"
    file.post_processor = processors.TemplateProcessing(
        f"{end} $A", f"{end} $A {end} $B", [(end, file.token_to_id(end))]
    )
    file.save(str(path))
    saved(source, tmp_path / "saved")
    assert_reloads(tmp_path / "saved", source)


def test_a_class_that_cannot_have_the_vocabulary_is_replaced(tmp_path: Path) -> None:
    source = published("gemma", "gpt2", tmp_path / "published", "GemmaTokenizer")
    loaded: Any = AutoTokenizer.from_pretrained(source)
    with pytest.raises(Exception, match="<unk>"):
        loaded(TEXTS[0])
    saved(source, tmp_path / "saved")
    assert_reloads(tmp_path / "saved", source)


def test_the_side_of_padding_is_that_of_the_class(tmp_path: Path) -> None:
    source = published("llama2", "llama2", tmp_path / "published")
    side: Any = AutoTokenizer.from_pretrained(source).padding_side
    folder = save_student(Student.load(config_of(source)), tmp_path / "final")
    assert AutoTokenizer.from_pretrained(folder).padding_side == side == "left"


def run_of(folder: Path, source: Path, **student: Any) -> dict[str, Any]:
    """Settings of a run of two steps on reference answers."""
    lines = [{"prompt": f"{number} + 4 =", "answer": f"{number + 4}"} for number in range(8)]
    write_lines(folder / "prompts.jsonl", lines)
    values = run_values(folder, save_steps=1, teachers={})
    values["data"] |= {"source": "answers", "answer_key": "answer"}
    values["student"] |= {"model": str(source), "distill_loss_weight": 0, **student}
    return values


@pytest.mark.parametrize("lora", [None, LORA])
def test_final_folder_checkpoints_and_merged_model_reload(
    tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    source = published("qwen2", "gpt_neox", tmp_path / "published")
    final, _ = run_here(run_of(tmp_path, source, lora=lora))
    folders = [final, *(path / "model" for path in (final.parent / "checkpoints").glob("step-*"))]
    assert len(folders) >= 2
    if lora is not None:
        folders.append(merge(final.parent, tmp_path / "merged"))
    for folder in folders:
        assert_reloads(folder, source)
        generation = json.loads((folder / "generation_config.json").read_text())
        assert (generation["temperature"], generation["top_k"]) == (0.6, 20)


def test_a_tokenizer_that_no_form_reloads_is_an_error_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = published("qwen2", "gpt_neox", tmp_path / "published")
    monkeypatch.setattr(pretrained, "_FORMS", [({}, {})])
    config = RunConfig.model_validate(run_of(tmp_path, source))
    for begin in (check_run, train):
        with pytest.raises(ConfigError) as caught:
            asyncio.run(begin(config, Console(file=StringIO())))
        assert caught.value.key == "student.model"
        assert "pre_tokenizer" in str(caught.value)
    assert not list(config.output_dir.glob("checkpoints/*"))
    student = StudentIdentity.read(config.student)
    findings = list(check_tokenizer([], config.student, student))
    assert [each.status for each in findings] == ["failed"]


def test_a_saved_folder_that_reloads_wrong_is_kept_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = published("qwen2", "gpt_neox", tmp_path / "published")
    student = Student.load(config_of(source))
    monkeypatch.setattr(pretrained, "_FORMS", [({}, {})])
    caplog.clear()
    folder = save_student(student, tmp_path / "final")
    assert (folder / "model.safetensors").is_file()
    assert [each.levelname for each in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(("tokenizer", "expected"), [("qwen2", "ok"), ("gpt_neox", "warning")])
def test_a_published_folder_that_transformers_loads_otherwise_is_reported(
    tmp_path: Path, tokenizer: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By the doctor, and in the log by every loader of a student or a teacher."""
    source = published("qwen2", tokenizer, tmp_path / "published")
    config = config_of(source)
    student = StudentIdentity.read(config)
    assert [each.status for each in check_tokenizer([], config, student)] == [expected]
    load_teacher_tokenizer(TeacherSettings(model=str(source)))
    load_local_tokenizer(str(source))
    warned = [each for each in caplog.records if each.levelname == "WARNING"]
    assert len(warned) == (3 if expected == "warning" else 0)
