"""A LoRA student's adapters in vLLM: each push is written with, and no other."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mopd_protocol.errors import ConfigError
from mopd_protocol.runtime.vllm_environment import prepare_environment
from mopd_trainer.config.run import RolloutConfig, StudentConfig
from mopd_trainer.rollouts.vllm.weight_sync import weight_push
from mopd_trainer.student.generation import Generation
from mopd_trainer.student.student import Student
from tests import tiny_models
from tests.broker import Broker
from tests.reference.teacher_scores import next_token_logprobs
from tests.trainer.lora_students import LORA, moved
from tests.trainer.runs import prompt_lines, run_values, write_lines
from tests.trainer.whole_runs import journal, run_here
from tests.vllm_marks import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.usefixtures("small_vllm")]

if TYPE_CHECKING:  # importing vLLM takes seconds
    from mopd_trainer.rollouts.vllm.engine import VllmEngine

PROMPTS = [[40, 9, 77, 120, 31, 8, 8], [55], [300, 12, 201]]
TEMPERATURE = 0.7
#: What vLLM and the student may differ by in float32, in nats; 3e-6 was found.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with heads of 32, the narrowest that vLLM's CPU attention takes, and garbage in
    the head's padding."""
    tokenizer = tiny_models.digit_tokenizer()
    config = {**tiny_models.qwen(tokenizer).config.to_dict(), "head_dim": 32}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        model.lm_head.weight[len(tokenizer) :] = 50.0
    return tiny_models.save(model, tokenizer, tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def config(model_folder: Path) -> StudentConfig:
    return StudentConfig.model_validate({"model": str(model_folder), "device": "cpu", "lora": LORA})


@pytest.fixture(scope="module")
def student(config: StudentConfig) -> Student:
    return Student.load(config)


@pytest.fixture(scope="module")
def engine(config: StudentConfig, student: Student, small_vllm: None) -> "Iterator[VllmEngine]":
    prepare_environment()
    from mopd_trainer.rollouts.vllm.engine import VllmEngine

    rollout = RolloutConfig(engine="vllm", max_new_tokens=12, temperature=TEMPERATURE)
    engine = VllmEngine(student, config, rollout, weight_push(config, None))
    yield engine
    engine.close()


def written(engine: "VllmEngine") -> list[tuple[list[int], Generation]]:
    """Prompts and their completions, all in flight at once."""
    requests = [PROMPTS[seed % len(PROMPTS)] for seed in range(12)]

    async def write() -> list[Generation]:
        return await asyncio.gather(
            *[engine.generate(prompt, seed=seed) for seed, prompt in enumerate(requests)]
        )

    return list(zip(requests, asyncio.run(write()), strict=True))


def gaps(student: Student, completions: list[tuple[list[int], Generation]]) -> list[float]:
    """Return the differences of vLLM's logprobs and the student's, in nats, per token."""
    real_ids = student.table.present.nonzero()[0].tolist()
    actual: list[float] = []
    for prompt, example in completions:
        for row, drawn in enumerate(example.token_ids):
            context = [*prompt, *example.token_ids[:row]]
            expected = next_token_logprobs(student.model, context, real_ids, TEMPERATURE)
            actual.append(abs(expected[drawn] - example.logprobs[row]))
    return actual


def test_each_pushed_version_writes_and_its_logprobs_are_the_students_own(
    engine: "VllmEngine", student: Student
) -> None:
    output = [written(engine)]  # before the first push the model is as it is, and so is the student
    actual = gaps(student, output[0])
    for version in range(2):
        moved(student, seed=version)
        asyncio.run(engine.push_weights())
        output.append(written(engine))
        actual += gaps(student, output[-1])
        assert max(gaps(student, output[-2])) > 100 * TOLERANCE  # of the version before
    print(f"largest gap {max(actual):.2e} nats over {len(actual)} tokens")  # noqa: T201
    assert max(actual) < TOLERANCE
    assert list(asyncio.run(_numbers(engine))) == [2]


def test_adapters_that_do_not_fit_into_vllm_raise_a_one_line_error(
    engine: "VllmEngine", config: StudentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.lora is not None
    wider = config.lora.model_copy(update={"rank": 9})
    other = Student.load(config.model_copy(update={"lora": wider}))
    monkeypatch.setattr(engine, "_student", other)
    with pytest.raises(ConfigError) as caught:
        asyncio.run(engine.push_weights())
    assert caught.value.key == "student.lora.target_modules"
    assert "\n" not in str(caught.value)


def test_a_run_learns_from_what_its_pushed_adapters_wrote(
    tmp_path: Path, model_folder: Path, broker: Broker
) -> None:
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(12, ["math"]))
    teacher = {
        "url": broker.serve({"math": model_folder})["math"],
        "top_k": 8,
        "loss": {"type": "policy_gradient"},
    }
    values = run_values(tmp_path, max_steps=3, teachers={"math": teacher})
    values["student"] |= {"model": str(model_folder), "learning_rate": 3e-2, "lora": LORA}
    values["rollout"] |= {"engine": "vllm", "prompts_per_step": 12}
    folder, _ = run_here(values)
    for line in journal(folder.parent):
        # Adapters that had not arrived would show here: steps are large.
        assert line["teacher/math/importance_ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert (folder / "adapter_model.safetensors").is_file()


async def _numbers(engine: "VllmEngine") -> Any:
    """Return the numbers of the adapters that vLLM has loaded."""
    running: Any = engine
    return await running._in_loop(running._engine.list_loras())
