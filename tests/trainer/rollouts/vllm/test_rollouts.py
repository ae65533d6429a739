"""The vLLM rollout engine: started once, and compared with the student's own forward pass."""

import asyncio
import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mopd_protocol.errors import MopdError
from mopd_protocol.runtime.vllm_environment import prepare_environment
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RolloutConfig, StudentConfig
from mopd_trainer.rollouts.engine_sampler import EngineSampler
from mopd_trainer.rollouts.vllm.weight_sync import PushThroughFolder, WeightReceiver
from mopd_trainer.student.generation import Generation
from mopd_trainer.student.student import Student
from tests import tiny_models
from tests.broker import Broker
from tests.reference.sampling import greedy, nucleus
from tests.reference.teacher_scores import next_token_logprobs
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
    """A student and its vLLM engine."""

    student: Student
    engine: "VllmEngine"

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


def saved_model(folder: Path, *, tied: bool) -> Path:
    """A tiny Qwen3 with heads of 32, the narrowest that vLLM's CPU attention takes."""
    tokenizer = tiny_models.digit_tokenizer()
    config = tiny_models.qwen(tokenizer).config.to_dict()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config.from_dict({**config, "head_dim": 32, "tie_word_embeddings": tied})
    )
    return tiny_models.save(model, tokenizer, folder)


@contextmanager
def started_student(folder: Path) -> Iterator[VllmStudent]:
    prepare_environment()
    from mopd_trainer.rollouts.vllm.engine import VllmEngine

    config = StudentConfig(model=str(folder), device="cpu")
    student = Student.load(config)
    rollout = RolloutConfig.model_validate(ROLLOUT)
    engine = VllmEngine(student, config, rollout, PushThroughFolder(), keep_topk=TOP_K)
    try:
        yield VllmStudent(student, engine)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model whose output head is not tied to the embedding."""
    return saved_model(tmp_path_factory.mktemp("student"), tied=False)


@pytest.fixture(scope="module")
def vllm_student(model_folder: Path, small_vllm: None) -> Iterator[VllmStudent]:
    with started_student(model_folder) as vllm_student:
        yield vllm_student


def change(vllm_student: VllmStudent, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Other settings for one test; an engine takes long to start."""
    rollout = RolloutConfig.model_validate({**ROLLOUT, **settings})
    monkeypatch.setattr(vllm_student.engine, "_rollout", rollout)


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


def test_a_head_that_is_the_embedding_is_pushed_with_it(tmp_path: Path) -> None:
    with started_student(saved_model(tmp_path, tied=True)) as vllm_student:
        head, embedding = (
            vllm_student.student.model.get_output_embeddings(),
            vllm_student.student.model.get_input_embeddings(),
        )
        assert head.weight is embedding.weight
        for seed in (1, 2):
            vllm_student.push(seed)
            assert max(vllm_student.gaps()) < TOLERANCE


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


def test_a_completion_ends_with_its_first_ending_token(vllm_student: VllmStudent) -> None:
    endings = set(vllm_student.student.table.roles.ending)
    completions = [example.token_ids for _, example in vllm_student.write(range(200))]
    assert any(completion[-1] in endings for completion in completions)
    for completion in completions:
        assert endings.isdisjoint(completion[:-1])
        assert len(completion) == 12 or completion[-1] in endings


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


def test_a_run_trains_on_vllm_completions_and_logs_their_policy_version(
    tmp_path: Path, model_folder: Path, broker: Broker
) -> None:
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(12, ["math"]))
    teacher = {
        "url": broker.serve({"math": model_folder})["math"],
        "top_k": 8,
        "loss": {"type": "policy_gradient"},
    }
    values = run_values(tmp_path, max_steps=3, teachers={"math": teacher})
    values["student"] |= {"model": str(model_folder), "learning_rate": 1e-2}
    values["rollout"] |= {"engine": "vllm", "prompts_per_step": 12}
    folder, _ = run_here(values)
    output = journal(folder.parent)
    assert [line["step"] for line in output] == [1, 2, 3]
    for line in output:
        assert line["staleness/max"] == 0
        # Weights that had not arrived would show here: steps are large.
        assert line["teacher/math/importance_ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    # The first step is written with the weights that the engine was started with.
    assert all(line["time/push"] > 0 for line in output[1:])
    completions = (folder.parent / "completions.jsonl").read_text().splitlines()
    assert {(line["step"], line["policy_version"]) for line in map(json.loads, completions)} == {
        (1, 0),
        (2, 1),
        (3, 2),
    }
