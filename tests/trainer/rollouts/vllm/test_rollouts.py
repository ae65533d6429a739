"""The vLLM rollout engines of two runs, of a full student and of adapters.

Each starts once, trains, and is then compared with the student's own forward pass.
"""

import asyncio
import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mopd_protocol.errors import ConfigError, MopdError
from mopd_protocol.runtime.vllm_environment import prepare_environment
from mopd_protocol.samples import Prompt
from mopd_trainer.collection import collect
from mopd_trainer.config.run import RolloutConfig, StudentConfig
from mopd_trainer.corrections import Corrector
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.rollouts.engine_sampler import EngineSampler
from mopd_trainer.rollouts.vllm.weight_sync import WeightReceiver
from mopd_trainer.student.generation import Generation
from mopd_trainer.student.student import Student
from tests import tiny_models
from tests.broker import Broker
from tests.reference.sampling import greedy, nucleus
from tests.reference.teacher_scores import next_token_logprobs
from tests.server.tiny_teachers import teacher_of
from tests.trainer.in_process import Recorded, scorer_of, teacher_config
from tests.trainer.lora_students import LORA, moved
from tests.trainer.runs import prompt_lines, run_values, write_lines
from tests.trainer.students import MESSAGES
from tests.trainer.whole_runs import journal, run_here
from tests.vllm_marks import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.usefixtures("small_vllm")]

if TYPE_CHECKING:  # importing vLLM takes seconds
    from mopd_trainer.rollouts.vllm.engine import VllmEngine

_Result = TypeVar("_Result")

PROMPTS = [[40, 9, 77, 120, 31, 8, 8], [55], [300, 12, 201]]
TOP_K = 4
ROLLOUT = {"engine": "vllm", "max_new_tokens": 12, "temperature": 0.7}
#: What vLLM and the student may differ by in float32, in nats; 3e-6 was found.
TOLERANCE = 2e-5


def call(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run the coroutine in a temporary event loop and return its result."""
    return asyncio.run(coroutine)


@dataclass(frozen=True)
class VllmStudent:
    """A student, its vLLM engine, and the folder of the finished run."""

    student: Student
    engine: "VllmEngine"
    final: Path

    @property
    def real_ids(self) -> list[int]:
        """Ids that have a token."""
        return self.student.table.present.nonzero()[0].tolist()

    def write(self, seeds: range = range(12)) -> list[tuple[list[int], Generation]]:
        """Prompts and their completions, all in flight at once."""
        requests = [(PROMPTS[seed % len(PROMPTS)], seed) for seed in seeds]

        async def write() -> list[Generation]:
            return await asyncio.gather(*[self.engine.generate(p, seed=s) for p, s in requests])

        return [
            (prompt, example) for (prompt, _), example in zip(requests, call(write()), strict=True)
        ]

    def change(self, seed: int) -> None:
        """Gives the student other weights, with garbage in the head's padding."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.student.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
            head = self.student.model.get_output_embeddings().weight
            head[self.student.table.size :] = 50.0

    def push(self, seed: int) -> None:
        """Changes the student and pushes it."""
        self.change(seed)
        call(self.engine.push_weights())

    def gaps(self) -> list[float]:
        """Return the differences of vLLM's logprobs and the student's, in nats, for drawn tokens
        and for the most likely ones."""
        actual: list[float] = []
        for prompt, example in self.write():
            for row, drawn in enumerate(example.token_ids):
                context = [*prompt, *example.token_ids[:row]]
                expected = next_token_logprobs(self.student.model, context, self.real_ids, 0.7)
                actual.append(abs(expected[drawn] - example.logprobs[row]))
                assert example.topk_ids is not None
                likely = sorted(expected, key=expected.__getitem__, reverse=True)[:TOP_K]
                np.testing.assert_allclose(
                    [expected[actual] for actual in example.topk_ids[row].tolist()],
                    [expected[actual] for actual in likely],
                    atol=TOLERANCE,
                )
        return actual


@pytest.fixture(scope="module")
def small_vllm() -> Iterator[None]:
    """Limit the memory of every vLLM and forbid downloads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with heads of 32, the narrowest that vLLM's CPU attention takes, and garbage in
    the output head's padding."""
    tokenizer = tiny_models.digit_tokenizer()
    config = {**tiny_models.qwen(tokenizer).config.to_dict(), "head_dim": 32}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        model.lm_head.weight[len(tokenizer) :] = 50.0
    return tiny_models.save(model, tokenizer, tmp_path_factory.mktemp("student"))


@contextmanager
def trained(tmp_path: Path, model_folder: Path, url: str, **student: Any) -> Iterator[VllmStudent]:
    """A run of three steps, whose engine stays open."""
    prepare_environment()
    from mopd_trainer.rollouts.vllm.engine import VllmEngine

    write_lines(tmp_path / "prompts.jsonl", prompt_lines(12, ["math"]))
    teacher = {"url": url, "top_k": 8, "loss": {"type": "policy_gradient"}}
    values = run_values(tmp_path, max_steps=3, teachers={"math": teacher})
    values["student"] |= {"model": str(model_folder), **student}
    values["rollout"] |= {"engine": "vllm", "prompts_per_step": 12}
    engines: list[VllmEngine] = []
    with pytest.MonkeyPatch.context() as patch:
        start, close = VllmEngine.__init__, VllmEngine.close
        patch.setattr(
            VllmEngine, "__init__", lambda *a, **o: start(*a, **{**o, "keep_topk": TOP_K})
        )
        patch.setattr(VllmEngine, "close", lambda engine: engines.append(engine))
        final, _ = run_here(values)
    [engine] = engines
    engine._rollout = RolloutConfig.model_validate(ROLLOUT)
    try:
        yield VllmStudent(engine._student, engine, final)
    finally:
        close(engine)


@pytest.fixture(scope="module")
def vllm_student(
    broker: Broker,
    model_folder: Path,
    small_vllm: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmStudent]:
    url = broker.serve({"math": model_folder})["math"]
    with trained(tmp_path_factory.mktemp("full"), model_folder, url, learning_rate=1e-2) as full:
        yield full


@pytest.fixture(scope="module")
def lora(
    broker: Broker,
    model_folder: Path,
    small_vllm: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmStudent]:
    url = broker.serve({"math": model_folder})["math"]
    adapters = {"learning_rate": 3e-2, "lora": LORA}
    with trained(tmp_path_factory.mktemp("lora"), model_folder, url, **adapters) as student:
        yield student


def change(vllm_student: VllmStudent, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Other settings for one test; an engine takes long to start."""
    rollout = RolloutConfig.model_validate({**ROLLOUT, **settings})
    monkeypatch.setattr(vllm_student.engine, "_rollout", rollout)


def test_a_completion_ends_with_its_first_ending_token(
    vllm_student: VllmStudent, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(vllm_student, monkeypatch, temperature=2.0)
    endings = set(vllm_student.student.table.roles.ending)
    completions = [example.token_ids for _, example in vllm_student.write(range(200))]
    assert any(completion[-1] in endings for completion in completions)
    for completion in completions:
        assert endings.isdisjoint(completion[:-1])
        assert len(completion) == 12 or completion[-1] in endings


def test_pushed_weights_generate_with_the_students_logprobs(vllm_student: VllmStudent) -> None:
    before = vllm_student.write()
    vllm_student.push(seed=1)
    after = vllm_student.write()
    assert [example.token_ids for _, example in before] != [
        example.token_ids for _, example in after
    ]
    gaps = vllm_student.gaps()
    print(f"largest gap {max(gaps):.2e} nats over {len(gaps)} tokens")  # noqa: T201
    assert max(gaps) < TOLERANCE


def test_weights_that_do_not_arrive_end_the_run(
    vllm_student: VllmStudent, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PushesNothing:
        """A push that forgets to."""

        async def push(self, student: Student, engine: WeightReceiver) -> None:
            """See ``WeightPush``."""

    with monkeypatch.context() as patched:
        patched.setattr(vllm_student.engine, "_push", PushesNothing())
        vllm_student.change(seed=3)
        with pytest.raises(MopdError, match="did not load the pushed weights"):
            call(vllm_student.engine.push_weights())
    call(vllm_student.engine.push_weights())
    assert max(vllm_student.gaps()) < TOLERANCE


def test_rows_of_the_head_without_a_token_are_never_written(vllm_student: VllmStudent) -> None:
    assert vllm_student.student.identity.logit_width > vllm_student.student.table.size
    vllm_student.push(seed=2)
    for _, example in vllm_student.write(range(60)):
        assert max(example.token_ids) < vllm_student.student.table.size


def test_a_seed_decides_the_completion_in_any_batch(vllm_student: VllmStudent) -> None:
    together = vllm_student.write(range(9))
    baseline = vllm_student.write(range(4, 5))[0][1]
    assert baseline.token_ids == together[4][1].token_ids
    assert len({tuple(example.token_ids) for _, example in together[1::3]}) == 3


def test_top_p_samples_from_the_nucleus_and_returns_its_logprobs(
    vllm_student: VllmStudent, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(vllm_student, monkeypatch, top_p=0.6)
    for prompt, example in vllm_student.write():
        for row, drawn in enumerate(example.token_ids):
            context = [*prompt, *example.token_ids[:row]]
            whole = next_token_logprobs(
                vllm_student.student.model, context, vllm_student.real_ids, 0.7
            )
            kept = nucleus(whole, 0.6)
            assert example.logprobs[row] == pytest.approx(kept[drawn], abs=TOLERANCE)


def test_temperature_zero_is_the_most_likely_token_each_time(
    vllm_student: VllmStudent, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(vllm_student, monkeypatch, temperature=0)
    for prompt, example in vllm_student.write(range(3)):
        endings = vllm_student.student.table.roles.ending
        expected = greedy(vllm_student.student.model, prompt, vllm_student.real_ids, endings, 12)
        assert example.token_ids == expected


def test_a_resumed_run_would_write_the_same(vllm_student: VllmStudent) -> None:
    prompts = [Prompt(index=n, messages=MESSAGES, teachers={"math": 1.0}) for n in range(4)]
    config = RolloutConfig.model_validate({**ROLLOUT, "samples_per_prompt": 2})

    def write(version: int) -> dict[int, list[int]]:
        async def complete() -> dict[int, list[int]]:
            sampler = EngineSampler(
                vllm_student.engine, vllm_student.student, config, seed=3, version=version
            )
            await sampler.push_weights(version)
            actual = [each async for each in sampler.sample(prompts, step=version)]
            assert {each.rollouts[0].policy_version for each in actual} == {version}
            return {c.place: c.rollouts[0].completion.token_ids.tolist() for c in actual}

        return call(complete())

    first, other = write(5), write(6)
    assert write(5) == first
    assert first != other
    assert sorted(first) == list(range(8))
    assert len({tuple(ids) for ids in first.values()}) > 4


def test_corrected_completions_continue_with_the_students_logprobs(
    vllm_student: VllmStudent, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"corrections": 3, "correction_ratio": 0.3, "correction_significance": 100}
    change(vllm_student, monkeypatch, **settings)
    student = vllm_student.student
    config = RolloutConfig.model_validate({**ROLLOUT, **settings})
    surer = deepcopy(student.model)
    with torch.no_grad():
        surer.get_submodule("model.norm").weight.mul_(3)  # three times the logits
    transport = Recorded(teacher_of(surer, tiny_models.digit_tokenizer()).app)
    prompts = [Prompt(index=n, messages=MESSAGES, teachers={"math": 1.0}) for n in range(6)]

    async def corrected() -> list[TrainingExample]:
        teachers = {"math": (transport, teacher_config(loss={"type": "topk_kl"}))}
        async with scorer_of(student.identity, teachers) as scorer:
            sampler = EngineSampler(vllm_student.engine, student, config, seed=3)
            await sampler.push_weights(0)
            corrector = Corrector(sampler, scorer, student.identity, config, seed=3)
            examples, _ = await collect(prompts, sampler, scorer, 0, corrector=corrector)
        return examples

    rollouts = [example.rollout for example in call(corrected())]
    assert max(len(rollout.corrected_tokens) for rollout in rollouts) == 3
    for rollout in rollouts:
        ids = rollout.completion.token_ids.tolist()
        assert len(ids) <= config.max_new_tokens
        assert rollout.sampled_logprobs is not None
        for row, token in enumerate(ids):
            context = [*rollout.prompt_token_ids.tolist(), *ids[:row]]
            likely = next_token_logprobs(student.model, context, vllm_student.real_ids, 0.7)
            expected = 0.0 if row in rollout.corrected_tokens else likely[token]
            assert rollout.sampled_logprobs[row] == pytest.approx(expected, abs=TOLERANCE)


def test_a_run_trains_on_vllm_completions_and_logs_their_policy_version(
    vllm_student: VllmStudent,
) -> None:
    output = journal(vllm_student.final.parent)
    assert [line["step"] for line in output] == [1, 2, 3]
    for line in output:
        assert line["staleness/max"] == 0
        # Weights that had not arrived would show here: steps are large.
        assert line["teacher/math/importance_ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    # The first step is written with the weights that the engine was started with.
    assert all(line["time/push"] > 0 for line in output[1:])
    completions = (vllm_student.final.parent / "completions.jsonl").read_text().splitlines()
    assert {(line["step"], line["policy_version"]) for line in map(json.loads, completions)} == {
        (1, 0),
        (2, 1),
        (3, 2),
    }


def test_a_run_learns_from_what_its_pushed_adapters_wrote(lora: VllmStudent) -> None:
    for line in journal(lora.final.parent):
        # Adapters that had not arrived would show here: steps are large.
        assert line["teacher/math/importance_ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert (lora.final / "adapter_model.safetensors").is_file()


def test_each_pushed_version_of_adapters_writes_with_the_students_own_logprobs(
    lora: VllmStudent,
) -> None:
    for version in range(2):
        moved(lora.student, seed=version)
        call(lora.engine.push_weights())
        assert max(lora.gaps()) < TOLERANCE
    running: Any = lora.engine
    assert len(call(running._in_loop(running._engine.list_loras()))) == 1


def test_adapters_that_do_not_fit_into_vllm_raise_a_one_line_error(
    lora: VllmStudent, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = {"model": str(model_folder), "device": "cpu", "lora": {**LORA, "rank": 9}}
    monkeypatch.setattr(lora.engine, "_student", Student.load(StudentConfig.model_validate(wider)))
    with pytest.raises(ConfigError) as caught:
        call(lora.engine.push_weights())
    assert caught.value.key == "student.lora.target_modules"
    assert "\n" not in str(caught.value)
