"""The completion source of a run's settings, and the table of engines."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from mopd_protocol.errors import MissingPackageError
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RolloutConfig, RunConfig
from mopd_trainer.rollouts.engine import ENGINES, Engine, worker_concurrency, worker_devices
from mopd_trainer.rollouts.factory import open_source
from mopd_trainer.rollouts.reference_completions import ReferenceCompletions
from mopd_trainer.rollouts.source import Mixture
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.student.generation import Generation
from mopd_trainer.student.student import Student
from tests.trainer.runs import run_values
from tests.trainer.students import MESSAGES, student_of

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
        ({"source": "answers"}, ReferenceCompletions),
        ({"on_policy_fraction": 0.5}, Mixture),
    ],
)
async def test_the_data_settings_choose_the_source(data: dict[str, Any], kind: type) -> None:
    async with open_source(config_of(data=data), student_of()) as (source, _):
        assert type(source) is kind


async def test_no_engine_is_started_for_reference_answers() -> None:
    config = config_of(data={"source": "answers"}, rollout={"engine": "vllm"})
    async with open_source(config, student_of()) as (source, _):
        assert type(source) is ReferenceCompletions


async def test_a_missing_vllm_raises_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mopd_trainer.rollouts.vllm.engine", None)
    source = open_source(config_of(rollout={"engine": "vllm"}), student_of())
    with pytest.raises(MissingPackageError) as caught:
        await source.__aenter__()
    assert caught.value.key == "vllm"


def test_every_engine_has_a_row() -> None:
    names = set(get_args(RolloutConfig.model_fields["engine"].annotation))
    assert names == {"transformers", *ENGINES}


class ToyEngine:
    """A ``GenerationEngine`` that returns the ending token."""

    def __init__(self, config: RunConfig, student: Student) -> None:
        self._ending = student.table.roles.ending[0]
        self.calls: list[str] = []

    async def generate(self, prompt_ids: Sequence[int], **options: Any) -> Generation:
        self.calls.append("generate")
        return Generation([self._ending], [0.0])

    async def push_weights(self) -> None:
        self.calls.append("push_weights")

    def close(self) -> None:
        self.calls.append("close")


async def test_an_engine_needs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[ToyEngine] = []

    def start(config: RunConfig, student: Student) -> ToyEngine:
        engines.append(ToyEngine(config, student))
        return engines[0]

    row = Engine(start, concurrency=lambda rollout: 3, devices=lambda rollout: 2)
    monkeypatch.setitem(ENGINES, "toy", row)
    config = config_of()
    rollout = config.rollout.model_copy(update={"engine": "toy"})
    config = config.model_copy(update={"rollout": rollout})
    prompts = [Prompt(index=0, messages=MESSAGES, teachers={"math": 1.0})]
    async with open_source(config, student_of()) as (source, _):
        batches = [batch async for batch in source.sample(prompts, step=0)]
    assert [len(batch.rollouts) for batch in batches] == [1]
    assert engines[0].calls == ["push_weights", "generate", "close"]
    assert (worker_concurrency(rollout), worker_devices(rollout)) == (3, 2)
