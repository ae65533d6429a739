"""Every loader rejects a checkpoint that is not a complete causal language model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd_protocol.errors import WeightsError
from mopd_protocol.request_tokenizer import RequestTokenizer
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_server.engines.transformers import load_engine
from mopd_server.engines.vllm.checkpoint import require_complete_checkpoint
from mopd_server.main import main
from mopd_server.scoring.tokenizer_loading import load_tokenizer
from mopd_server.settings import TeacherSettings
from mopd_trainer.config.student import StudentConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.student.student import Student
from mopd_trainer.student.weight_files import FullModelFiles
from mopd_trainer.teachers.local.model import LocalModel
from tests.damaged_models import DAMAGED, DAMAGED_FILES, SOUND, damaged
from tests.vllm_marks import needs_vllm

CPU = torch.device("cpu")


def _settings(folder: Path) -> TeacherSettings:
    return TeacherSettings(model=str(folder), engine="transformers", device="cpu")


def _table(folder: Path) -> TokenTable:
    return RequestTokenizer.wrap(load_tokenizer(_settings(folder))).table


def _student(folder: Path) -> Student:
    return Student.load(StudentConfig(model=str(folder), device="cpu"))


def _local_teacher(folder: Path) -> LocalModel:
    config = TeacherConfig.model_validate({"placement": "local", "model": str(folder), "top_k": 1})
    return LocalModel.load("math", config, _table(folder), CPU, 64)


def _checkpoint(folder: Path) -> Any:
    student = _student(damaged("sharded", folder.parent / "sound"))
    return FullModelFiles().read(student.model, folder)


LOADERS: dict[str, Callable[[Path], Any]] = {
    "teacher, transformers": lambda folder: load_engine(_settings(folder), _table(folder)),
    "teacher, vLLM": lambda folder: require_complete_checkpoint(_settings(folder)),
    "student": _student,
    "local teacher": _local_teacher,
    "checkpoint": _checkpoint,
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("damage", [*DAMAGED, *DAMAGED_FILES, "reward model", "tied reward model"])
def test_incomplete_weights_are_rejected_by_name(loader: str, damage: str, tmp_path: Path) -> None:
    folder = damaged(damage, tmp_path / "model")
    with pytest.raises(WeightsError) as caught:
        LOADERS[loader](folder)
    assert caught.value.code == "incomplete_weights"
    stray = "score.weight" if damage == "tied reward model" else "lm_head.weight"
    _, expected = (DAMAGED | DAMAGED_FILES).get(damage, (None, stray))
    assert str(caught.value.key).startswith(expected)
    assert str(caught.value.key) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("loader", [name for name in LOADERS if name != "checkpoint"])
@pytest.mark.parametrize("form", SOUND)
def test_sound_weights_are_loaded(loader: str, form: str, tmp_path: Path) -> None:
    LOADERS[loader](damaged(form, tmp_path / "model"))


@pytest.mark.parametrize(
    "engine", ["transformers", pytest.param("vllm", marks=[*needs_vllm, pytest.mark.slow])]
)
def test_a_teacher_with_a_missing_tensor_exits_with_one_sentence(
    engine: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = damaged("missing head", tmp_path / "model")
    assert main(["serve", str(folder), "--engine", engine, "--device", "cpu", "--port", "0"]) == 1
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("mopd-teacher: ")
    assert "lm_head.weight" in last
