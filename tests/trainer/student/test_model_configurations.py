"""Nulls in the configurations of published models: the student and both kinds of local scoring."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mopd_protocol.errors import ConfigError
from mopd_server.engines.registry import load_engine
from mopd_server.scoring.tokenizer_loading import ServedTokenizer, load_tokenizer
from mopd_server.settings import TeacherSettings
from mopd_trainer.config.student import StudentConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.local.manifest import LocalIdentity
from mopd_trainer.teachers.local.model import LocalModel
from tests import tiny_models
from tests.trainer.students import CPU, tokenizer

SIZES = {
    "vocab_size": 448,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, "rotary_dim": 8}
#: Family -> its sizes, values that are null, and whether transformers can still run it.
FAMILIES: dict[str, tuple[dict[str, Any], list[str], bool]] = {
    "qwen2": ({}, ["logit_scale", "logits_scaling", "final_logit_softcapping"], True),
    "gemma2": ({"head_dim": 16}, ["final_logit_softcapping", "logit_scale"], True),
    "granite": ({}, ["eos_token_id", "pad_token_id", "dtype", "logit_scale"], True),
    "gpt2": (GPT, ["logit_scale", "dtype"], True),
    "gptj": (GPT, ["logit_scale", "dtype"], True),
    "mpt": ({"d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 256}, [], True),
    "cohere": ({}, ["logit_scale"], False),
    "mistral": ({}, ["tie_word_embeddings"], False),
}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model folder of a family with its nulls."""
    sizes, nulls, _ = FAMILIES[request.param]
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SIZES | sizes)
    model = AutoModelForCausalLM.from_config(config)
    tiny_models.save(model, tokenizer("digit"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict.fromkeys(nulls)))
    return tmp_path


def load_student(folder: Path) -> Student:
    return Student.load(StudentConfig(model=str(folder), device="cpu"))


def load_local(folder: Path) -> LocalModel:
    values = {"placement": "local", "model": str(folder), "top_k": 8}
    config = TeacherConfig.model_validate(values)
    identity = LocalIdentity.read("math", config, "cpu")
    assert identity.manifest.max_model_len == 256
    return LocalModel.load("math", config, identity.tokenizer.table, CPU, 512)


def load_service(folder: Path) -> Any:
    settings = TeacherSettings(model=str(folder), name="x", device="cpu", engine="transformers")
    table = ServedTokenizer.of(load_tokenizer(settings)).requests.table
    return load_engine(settings, table)


@pytest.mark.parametrize("folder", [n for n, each in FAMILIES.items() if each[2]], indirect=True)
def test_a_null_is_a_missing_value(folder: Path) -> None:
    student = load_student(folder)
    assert student.max_length == 256
    head = student._head
    ids = torch.arange(8)[None]
    with torch.no_grad():
        logits = student.model(ids).logits
        if head is not None:
            hidden = student.model.base_model(ids).last_hidden_state[0]
            real = head.real_ids
            torch.testing.assert_close(head.logits(hidden)[:, real], logits[0][:, real])
    load_local(folder)
    assert load_service(folder).description.max_model_len == 256


@pytest.mark.parametrize("load", [load_student, load_local, load_service])
@pytest.mark.parametrize(
    "folder", [n for n, each in FAMILIES.items() if not each[2]], indirect=True
)
def test_a_null_that_no_model_can_have_is_named(folder: Path, load: Any) -> None:
    with pytest.raises(ConfigError, match=r"logit_scale|tie_word_embeddings"):
        load(folder)
