"""A package that the settings ask for is missed before anything else is done."""

from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.errors import ConfigError
from mopd_trainer.config.extras import require_packages
from mopd_trainer.config.run import RunConfig
from tests.trainer.runs import run_values

ASKED: dict[str, dict[str, Any]] = {
    "wandb": {"logging": {"wandb": True}},
    "trackio": {"logging": {"trackio": True}},
    "peft": {"student": {"model": "./student", "lora": {"rank": 4}}},
    "vllm": {"rollout": {"max_new_tokens": 8, "engine": "vllm"}},
}
ON_RAY: dict[str, Any] = {"resources": {"device": "cpu", "student": 1, "rollout_workers": 1}}


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mopd_trainer.config.extras.find_spec", lambda name: None)


def config_of(folder: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate({**run_values(folder), **changes})


@pytest.mark.parametrize("package", ASKED)
def test_what_is_not_installed_is_one_sentence(tmp_path: Path, package: str) -> None:
    require_packages(config_of(tmp_path))
    with pytest.raises(ConfigError, match=f"^[a-z.]+ is .+, but {package} is not installed; pip "):
        require_packages(config_of(tmp_path, **ASKED[package]))


@pytest.mark.parametrize("package", ["peft", "vllm"])
def test_what_other_machines_of_a_cluster_have_is_not_asked_here(
    tmp_path: Path, package: str
) -> None:
    require_packages(config_of(tmp_path, **ASKED[package], **ON_RAY))


def test_an_engine_that_writes_nothing_is_not_needed(tmp_path: Path) -> None:
    asked = ASKED["vllm"]
    answers = {"prompts": "prompts.jsonl", "source": "answers", "answer_key": "solution"}
    require_packages(config_of(tmp_path, **asked, data=answers))
    require_packages(config_of(tmp_path, **asked, replay=str(tmp_path / "other")))
