"""Tests of the table of engines: selection, options, and the row of a new engine."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mopd_protocol.errors import ConfigError
from mopd_server.engines.registry import ENGINES, EngineEntry
from mopd_server.engines.vllm import loading
from mopd_server.main import main
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import TeacherSettings
from tests import tiny_models

STARTUP = "mopd_server.engines.vllm.startup"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tiny_models.digit_tokenizer()
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen"
    return tiny_models.save(tiny_models.qwen(tokenizer), tokenizer, folder)


class VllmSelectedError(Exception):
    """vLLM was selected."""


class Machine:
    """Simulates whether vLLM and an accelerator are installed, and the import of vLLM."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        patch.setattr(loading, "prepare_environment", lambda: None)

    def set(self, *, accelerator: bool, installed: bool) -> None:
        self._patch.setattr(torch.accelerator, "is_available", lambda: accelerator)
        spec = ModuleSpec("vllm", None) if installed else None
        find_spec = importlib.util.find_spec
        self._patch.setattr(
            loading.importlib.util,
            "find_spec",
            lambda name, package=None: spec if name == "vllm" else find_spec(name, package),
        )

    def import_vllm_as(self, module: ModuleType | None) -> None:
        """Replace the module that imports vLLM; with ``None`` its import fails."""
        self._patch.setitem(sys.modules, STARTUP, module)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def vllm_for(*devices: str) -> ModuleType:
    module = ModuleType(STARTUP)

    def start_engine(settings: TeacherSettings, table: object) -> None:
        raise VllmSelectedError(settings.model)

    vars(module).update(supports_device=lambda device: device in devices, start_engine=start_engine)
    return module


def selected_engine(model_folder: Path, **settings: object) -> str:
    try:
        service = TeacherService.load(TeacherSettings(model=str(model_folder), **settings))
    except VllmSelectedError:
        return "vllm"
    return service.manifest.engine


@pytest.mark.parametrize(
    ("accelerator", "installed", "devices", "engine"),
    [
        (True, True, ["cpu"], "vllm"),
        (True, True, ["tpu"], "transformers"),  # vLLM is built for another device
        (True, False, ["cpu"], "transformers"),
        (False, True, ["cpu"], "transformers"),
    ],
)
def test_auto_selects_vllm_with_a_supported_accelerator(
    accelerator: bool, installed: bool, devices: list[str], engine: str,
    model_folder: Path, machine: Machine,
) -> None:  # fmt: skip
    machine.set(accelerator=accelerator, installed=installed)
    machine.import_vllm_as(vllm_for(*devices))
    assert selected_engine(model_folder, device="cpu") == engine


def test_auto_skips_vllm_with_a_warning_if_its_import_fails(
    model_folder: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.set(accelerator=True, installed=True)
    machine.import_vllm_as(None)
    assert selected_engine(model_folder, device="cpu") == "transformers"
    assert "vLLM is installed" in caplog.text


def test_requested_engine_is_loaded_or_an_error(model_folder: Path, machine: Machine) -> None:
    machine.set(accelerator=False, installed=True)
    machine.import_vllm_as(vllm_for())
    assert selected_engine(model_folder, engine="vllm") == "vllm"
    assert selected_engine(model_folder, engine="transformers") == "transformers"
    machine.import_vllm_as(None)
    for engine in ("vllm", "unknown"):
        with pytest.raises(ConfigError) as caught:
            selected_engine(model_folder, engine=engine)
        assert caught.value.key == "engine"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 2),
        ("data_parallel_size", 2),
        ("quantization", "fp8"),
        ("vllm_arg", ("seed=1",)),
    ],
)
def test_option_of_another_engine_is_an_error(
    option: str, value: object, model_folder: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        selected_engine(model_folder, engine="transformers", **{option: value})
    assert caught.value.key == option


def test_new_engine_needs_one_module_and_one_row(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ENGINES, "uniform", EngineEntry("tests.server.engines.uniform_engine"))
    service = TeacherService.load(TeacherSettings(model=str(model_folder), engine="uniform"))
    service.warm_up()
    assert (service.ready, service.manifest.engine) == (True, "uniform")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "{auto,vllm,transformers,uniform}" in capsys.readouterr().out
