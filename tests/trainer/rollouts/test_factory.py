"""Who completes prompts, by the run's settings."""

import sys
from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.errors import ConfigError
from mopd_trainer.config.run import RunConfig
from mopd_trainer.rollouts.factory import chosen_source
from mopd_trainer.rollouts.reference_completions import AnswerReader
from mopd_trainer.rollouts.source import Mixture
from mopd_trainer.rollouts.transformers_sampler import Sampler
from tests.trainer.runs import run_values
from tests.trainer.students import student_of

pytestmark = pytest.mark.anyio


def config_of(**changes: dict[str, Any]) -> RunConfig:
    values = run_values(Path("nowhere"))
    for part, settings in changes.items():
        values[part] |= settings
    return RunConfig.model_validate(values)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({}, Sampler),
        ({"source": "answers"}, AnswerReader),
        ({"on_policy_fraction": 0.5}, Mixture),
    ],
)
async def test_the_data_says_who_completes_prompts(data: dict[str, Any], kind: type) -> None:
    async with chosen_source(config_of(data=data), student_of()) as source:
        assert type(source) is kind


async def test_vllm_is_not_started_where_the_student_writes_nothing() -> None:
    config = config_of(data={"source": "answers"}, rollout={"engine": "vllm"})
    async with chosen_source(config, student_of()) as source:
        assert type(source) is AnswerReader


async def test_a_missing_vllm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mopd_trainer.rollouts.vllm.engine", None)
    source = chosen_source(config_of(rollout={"engine": "vllm"}), student_of())
    with pytest.raises(ConfigError, match=r"rollout\.engine 'vllm' needs vLLM, which cannot be"):
        await source.__aenter__()
