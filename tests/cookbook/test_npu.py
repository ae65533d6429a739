"""``torch_npu`` is imported only for an NPU, by both the trainer and the server."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mopd_protocol.errors import ConfigError
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import TeacherSettings
from mopd_trainer.config.run import StudentConfig
from mopd_trainer.student.student import Student
from tests import tiny_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that either side could load."""
    tokenizer = tiny_models.digit_tokenizer()
    return tiny_models.save(
        tiny_models.qwen(tokenizer), tokenizer, tmp_path_factory.mktemp("model")
    )


def _student(folder: Path, device: str) -> object:
    return Student.load(StudentConfig(model=str(folder), device=device))


def _teacher(folder: Path, device: str) -> object:
    settings = TeacherSettings(model=str(folder), device=device, engine="transformers")
    return TeacherService.load(settings)


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A ``torch_npu`` that can be imported, and adds nothing to torch."""
    (tmp_path / "torch_npu.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield "torch_npu"
    sys.modules.pop("torch_npu", None)


@pytest.mark.parametrize("load", [_student, _teacher])
def test_the_backend_is_imported_only_for_an_npu(
    load: Callable[[Path, str], object], folder: Path, backend: str
) -> None:
    load(folder, "cpu")
    assert backend not in sys.modules
    with pytest.raises(ConfigError, match="npu:1"):
        load(folder, "npu:1")
    assert backend in sys.modules


@pytest.mark.parametrize("load", [_student, _teacher])
def test_without_the_backend_there_is_one_sentence(
    load: Callable[[Path, str], object], folder: Path
) -> None:
    with pytest.raises(ConfigError, match="needs torch_npu, and that cannot be") as refusal:
        load(folder, "npu")
    assert "\n" not in str(refusal.value)
