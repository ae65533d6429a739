"""Which engine a teacher is given: what is asked for, what is there, and what is refused."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mopd_protocol.errors import ConfigError
from mopd_server.scoring import loading
from mopd_server.scoring.loading import load_service
from mopd_server.settings import TeacherSettings
from tests import tiny_models


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tiny_models.digit_tokenizer()
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen"
    return tiny_models.save(tiny_models.qwen(tokenizer), tokenizer, folder)


class AskedOfVllm(Exception):
    """The choice has fallen on vLLM."""


class Machine:
    """Pretends that vLLM and an accelerator are there, or not, and that importing it ends so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def has(self, *, accelerator: bool, installed: bool) -> None:
        self._patch.setattr(torch.accelerator, "is_available", lambda: accelerator)
        spec = ModuleSpec("vllm", None) if installed else None
        real = importlib.util.find_spec
        self._patch.setattr(
            loading.importlib.util,
            "find_spec",
            lambda name, package=None: spec if name == "vllm" else real(name, package),
        )

    def importing_ends_with(self, outcome: ModuleType | None) -> None:
        """``None`` makes the import fail, as Python defines it."""
        self._patch.setitem(sys.modules, "mopd_server.engines.vllm.engine", outcome)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(loading, "prepare_environment", lambda: None)
    return Machine(monkeypatch)


def vllm_for(*devices: str) -> ModuleType:
    """A stand-in for the module that imports vLLM; asked to load a model, it says so."""
    module = ModuleType("mopd_server.engines.vllm.engine")

    def load(settings: TeacherSettings, table: object) -> None:
        raise AskedOfVllm(settings.model)

    vars(module).update(accelerates=lambda device: device in devices, load_vllm_engine=load)
    return module


def engine_of(model_folder: Path, **settings: object) -> str:
    try:
        service = load_service(TeacherSettings(model=str(model_folder), **settings))
    except AskedOfVllm:
        return "vllm"
    return service.manifest.engine


@pytest.mark.parametrize(
    ("accelerator", "installed", "devices", "engine"),
    [
        (True, True, ["cpu"], "vllm"),
        (True, True, ["tpu"], "transformers"),  # a vLLM for something else than what is asked
        (True, False, ["cpu"], "transformers"),
        (False, True, ["cpu"], "transformers"),
    ],
)
def test_auto_takes_vllm_where_it_can_use_an_accelerator(
    accelerator: bool, installed: bool, devices: list[str], engine: str,
    model_folder: Path, machine: Machine,
) -> None:  # fmt: skip
    machine.has(accelerator=accelerator, installed=installed)
    machine.importing_ends_with(vllm_for(*devices))
    assert engine_of(model_folder, device="cpu") == engine


def test_auto_does_without_a_vllm_that_cannot_be_imported(
    model_folder: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.has(accelerator=True, installed=True)
    machine.importing_ends_with(None)
    assert engine_of(model_folder, device="cpu") == "transformers"
    assert "vLLM is installed and cannot be imported" in caplog.text


def test_an_engine_that_is_asked_for_is_taken_or_refused(
    model_folder: Path, machine: Machine
) -> None:
    machine.has(accelerator=False, installed=True)
    machine.importing_ends_with(vllm_for())
    assert engine_of(model_folder, engine="vllm") == "vllm"
    assert engine_of(model_folder, engine="transformers") == "transformers"
    machine.importing_ends_with(None)
    with pytest.raises(ConfigError, match=r"install mopd\[vllm\], or take --engine transformers"):
        load_service(TeacherSettings(model=str(model_folder), engine="vllm"))


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"data_parallel_size": 2}, "--data-parallel-size"),
        ({"quantization": "fp8"}, "--quantization"),
    ],
)
def test_what_only_vllm_does_is_not_ignored_by_another_engine(
    settings: dict[str, object], option: str, model_folder: Path
) -> None:
    teacher = TeacherSettings(model=str(model_folder), engine="transformers", **settings)
    with pytest.raises(ConfigError, match=f"{option} is only for the vLLM engine"):
        load_service(teacher)
