"""vLLM as the student's pen: started once, and compared with the student's own forward pass."""

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
from tests.trainer.runs import questions, run_values, write_lines
from tests.trainer.students import QUESTION
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
    """Its result, from a loop that is gone afterwards."""
    return asyncio.run(coroutine)


@dataclass(frozen=True)
class Pen:
    """A student and the engine that writes for it."""

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
        """Nats between what is told of drawn tokens, and what the student says; the most likely
        tokens are looked at, too."""
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
def started_pen(folder: Path) -> Iterator[Pen]:
    prepare_environment()
    from mopd_trainer.rollouts.vllm.engine import VllmEngine

    config = StudentConfig(model=str(folder), device="cpu")
    student = Student.load(config)
    rollout = RolloutConfig.model_validate(ROLLOUT)
    engine = VllmEngine(student, config, rollout, PushThroughFolder(), keep_topk=TOP_K)
    try:
        yield Pen(student, engine)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its head is a matrix of its own."""
    return saved_model(tmp_path_factory.mktemp("student"), tied=False)


@pytest.fixture(scope="module")
def pen(model_folder: Path, small_vllm: None) -> Iterator[Pen]:
    with started_pen(model_folder) as pen:
        yield pen


def change(pen: Pen, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Other settings for one test; an engine takes long to start."""
    rollout = RolloutConfig.model_validate({**ROLLOUT, **settings})
    monkeypatch.setattr(pen.engine, "_rollout", rollout)


def test_pushed_weights_write_and_their_logprobs_are_the_students_own(pen: Pen) -> None:
    before = pen.write()
    pen.push(seed=1)
    after = pen.write()
    assert [example.token_ids for _, example in before] != [
        example.token_ids for _, example in after
    ]
    gaps = pen.gaps()
    print(f"largest gap {max(gaps):.2e} nats over {len(gaps)} tokens")  # noqa: T201
    assert max(gaps) < TOLERANCE


def test_a_head_that_is_the_embedding_is_pushed_with_it(tmp_path: Path) -> None:
    with started_pen(saved_model(tmp_path, tied=True)) as pen:
        head, embedding = (
            pen.student.model.get_output_embeddings(),
            pen.student.model.get_input_embeddings(),
        )
        assert head.weight is embedding.weight
        for seed in (1, 2):
            pen.push(seed)
            assert max(pen.gaps()) < TOLERANCE


def test_weights_that_do_not_arrive_end_the_run(pen: Pen, monkeypatch: pytest.MonkeyPatch) -> None:
    class PushesNothing:
        """A push that forgets to."""

        async def push(self, student: Student, engine: WeightReceiver) -> None:
            """See ``WeightPush``."""

    with monkeypatch.context() as patched:
        patched.setattr(pen.engine, "_push", PushesNothing())
        pen.change(seed=3)
        with pytest.raises(MopdError, match="did not load the pushed weights"):
            call(pen.engine.push_weights())
    call(pen.engine.push_weights())
    assert max(pen.gaps()) < TOLERANCE


def test_rows_of_the_head_without_a_token_are_never_written(pen: Pen) -> None:
    assert pen.student.identity.logit_width > pen.student.table.size
    pen.push(seed=2)
    for _, example in pen.write(range(60)):
        assert max(example.token_ids) < pen.student.table.size


def test_a_completion_ends_with_its_first_ending_token(pen: Pen) -> None:
    endings = set(pen.student.table.roles.ending)
    completions = [example.token_ids for _, example in pen.write(range(200))]
    assert any(completion[-1] in endings for completion in completions)
    for completion in completions:
        assert endings.isdisjoint(completion[:-1])
        assert len(completion) == 12 or completion[-1] in endings


def test_a_seed_decides_what_is_written_beside_whatever_else(pen: Pen) -> None:
    together = pen.write(range(9))
    baseline = pen.write(range(4, 5))[0][1]
    assert baseline.token_ids == together[4][1].token_ids
    assert len({tuple(example.token_ids) for _, example in together[1::3]}) == 3


def test_top_p_writes_from_the_nucleus_and_tells_its_logprobs(
    pen: Pen, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(pen, monkeypatch, top_p=0.6)
    for prompt, example in pen.write():
        for row, drawn in enumerate(example.token_ids):
            context = [*prompt, *example.token_ids[:row]]
            whole = next_token_logprobs(pen.student.model, context, pen.real_ids, 0.7)
            kept = nucleus(whole, 0.6)
            assert example.logprobs[row] == pytest.approx(kept[drawn], abs=TOLERANCE)


def test_temperature_zero_is_the_most_likely_token_each_time(
    pen: Pen, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(pen, monkeypatch, temperature=0)
    for prompt, example in pen.write(range(3)):
        endings = pen.student.table.roles.ending
        expected = greedy(pen.student.model, prompt, pen.real_ids, endings, 12)
        assert example.token_ids == expected


def test_a_resumed_run_would_write_the_same(pen: Pen) -> None:
    prompts = [Prompt(index=n, messages=QUESTION, teachers={"math": 1.0}) for n in range(4)]
    config = RolloutConfig.model_validate({**ROLLOUT, "samples_per_prompt": 2})

    def write(version: int) -> dict[int, list[int]]:
        async def complete() -> dict[int, list[int]]:
            sampler = EngineSampler(pen.engine, pen.student, config, seed=3, version=version)
            await sampler.push(version)
            actual = [each async for each in sampler.sample(prompts, step=version)]
            assert {each.rollouts[0].policy_version for each in actual} == {version}
            return {c.place: c.rollouts[0].completion.token_ids.tolist() for c in actual}

        return call(complete())

    first, other = write(5), write(6)
    assert write(5) == first
    assert first != other
    assert sorted(first) == list(range(8))
    assert len({tuple(ids) for ids in first.values()}) > 4


def test_a_run_trains_on_what_vllm_writes_and_tells_under_which_weights(
    tmp_path: Path, model_folder: Path, broker: Broker
) -> None:
    write_lines(tmp_path / "prompts.jsonl", questions(12, ["math"]))
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
