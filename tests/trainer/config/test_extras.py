"""Missing optional packages are detected before a run starts."""

from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.errors import MissingPackageError
from mopd_trainer.config.extras import require_packages
from mopd_trainer.config.run import RunConfig
from tests.trainer.runs import run_values

NEEDED: dict[str, dict[str, Any]] = {
    "wandb": {"logging": {"wandb": True}},
    "trackio": {"logging": {"trackio": True}},
    "peft": {"student": {"model": "./student", "lora": {"rank": 4}}},
    "flash_attn": {
        "student": {
            "model": "./student",
            "attn_implementation": "flash_attention_2",
            "dtype": "bfloat16",
        }
    },
    "vllm": {"rollout": {"max_new_tokens": 8, "engine": "vllm"}},
}
REFERENCE_ANSWERS = {"prompts": "prompts.jsonl", "source": "answers", "answer_key": "solution"}


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mopd_trainer.config.extras.find_spec", lambda name: None)


def config_of(folder: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate({**run_values(folder), **changes})


@pytest.mark.parametrize("package", NEEDED)
def test_missing_package_is_reported(tmp_path: Path, package: str) -> None:
    require_packages(config_of(tmp_path))
    with pytest.raises(MissingPackageError) as caught:
        require_packages(config_of(tmp_path, **NEEDED[package]))
    assert caught.value.key == package


@pytest.mark.parametrize(
    ("package", "changes"),
    [
        ("peft", {"resources": {"device": "cpu", "rollout_workers": 1}}),  # on other machines
        ("vllm", {"resources": {"device": "cpu", "rollout_workers": 1}}),
        ("vllm", {"data": REFERENCE_ANSWERS}),  # nothing is sampled
        ("vllm", {"replay": "other"}),
    ],
)
def test_package_that_this_process_does_not_use_may_be_missing(
    tmp_path: Path, package: str, changes: dict[str, Any]
) -> None:
    require_packages(config_of(tmp_path, **NEEDED[package], **changes))
