"""A single rollout worker: the weights that it generates with, for both engines."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mopd_trainer.config.run import RunConfig, StudentConfig
from mopd_trainer.rollouts.remote_sampler import Weights
from mopd_trainer.rollouts.worker import RolloutWorker
from mopd_trainer.student.student import Student
from tests import tiny_models
from tests.reference.teacher_scores import completion_logprobs
from tests.trainer.runs import run_values
from tests.vllm_marks import needs_vllm

PROMPTS = [[40, 9, 77, 120, 31, 8, 8], [55], [300, 12, 201]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Heads of 32, the narrowest that vLLM's CPU attention takes; the output head is tied."""
    tokenizer = tiny_models.digit_tokenizer()
    config = {
        **tiny_models.qwen(tokenizer).config.to_dict(),
        "head_dim": 32,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    return tiny_models.save(
        Qwen3ForCausalLM(Qwen3Config.from_dict(config)), tokenizer, tmp_path / "student"
    )


def config_of(folder: Path, **rollout: Any) -> RunConfig:
    values = run_values(folder.parent)
    values["rollout"] |= {"max_new_tokens": 12, "temperature": 0.7, **rollout}
    return RunConfig.model_validate(values)


def changed(student: Student, seed: int) -> Weights:
    """Return changed weights, and load them into the student."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in student.trained().values():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return {name: p.detach().numpy().copy() for name, p in student.trained().items()}


class Store:
    """Weights that are fetched, and how often."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.fetched = 0

    async def __call__(self) -> Weights:
        self.fetched += 1
        return self.weights


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_worker_generates_with_the_pushed_weights(
    folder: Path, lora: dict[str, int] | None
) -> None:
    config = config_of(folder)
    student_config = StudentConfig.model_validate({**config.student.model_dump(), "lora": lora})
    config = config.model_copy(update={"student": student_config})
    worker, student = RolloutWorker(config), Student.load(config.student)

    async def written(version: int, store: Callable[[], Any]) -> list[list[int]]:
        actual = await worker.generate(PROMPTS, seed=7, version=version, weights=store)
        return [sampled.token_ids for sampled in actual]

    stores = {version: Store(changed(student, version)) for version in (0, 1)}
    expected: dict[int, list[list[int]]] = {}
    for version, store in stores.items():
        for name, parameter in student.trained().items():
            parameter.data = torch.tensor(store.weights[name])
        own = student.generate(PROMPTS, config.rollout, seed=7)
        expected[version] = [sampled.token_ids for sampled in own]
    assert expected[0] != expected[1]
    for version in (0, 0, 1, 0):
        assert asyncio.run(written(version, stores[version])) == expected[version]
    assert (stores[0].fetched, stores[1].fetched) == (2, 1)


@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=needs_vllm)])
def test_a_worker_generates_with_vllm(
    folder: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """The returned logprobs are those of the pushed weights, whose head is the embedding."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    config = config_of(folder, engine=engine)
    student = Student.load(config.student)
    head = student.model.get_output_embeddings()
    assert head.weight is student.model.get_input_embeddings().weight
    store = Store(changed(student, 3))
    worker = RolloutWorker(config)

    async def written() -> list[Any]:
        requests = [
            worker.generate([prompt], seed=seed, version=5, weights=store)
            for seed, prompt in enumerate(PROMPTS)
        ]
        return await asyncio.gather(*requests)

    try:
        actual = asyncio.run(written())
    finally:
        worker.close()
    assert store.fetched == 1
    real = student.table.present.nonzero()[0].tolist()
    for prompt, (sampled,) in zip(PROMPTS, actual, strict=True):
        expected = completion_logprobs(student.model, prompt, sampled.token_ids, real, 0.7)
        own = [row[token] for row, token in zip(expected, sampled.token_ids, strict=True)]
        np.testing.assert_allclose(sampled.logprobs, own, atol=2e-5)
