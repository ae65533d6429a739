"""One model as a student and as a teacher service: completions and likelihoods are equal."""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from mopd_client.teacher_client import TeacherClient
from mopd_protocol.samples import Message, Prompt
from mopd_trainer.config.evaluation import EvaluationSetConfig
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.evaluation.models import Completion, StudentModel
from mopd_trainer.evaluation.results import SetResult, evaluate_set
from mopd_trainer.evaluation.sets import EvaluationSet
from mopd_trainer.evaluation.teacher_model import TeacherModel
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.student.student import Student
from tests.server.tiny_teachers import TinyTeacher, teacher_of
from tests.trainer.in_process import Recorded
from tests.trainer.students import CPU, model_of, table, tokenizer

pytestmark = pytest.mark.anyio

PROMPTS = [
    Prompt(index=n, messages=(Message(role="user", content=f"{n} + 4 ="),), teachers={})
    for n in range(40)  # more than one request of a teacher
]
GREEDY = RolloutConfig(max_new_tokens=12, temperature=0.0, generation_batch_size=16)


def model() -> PreTrainedModel:
    """Return a model that often ends its turn."""
    network = model_of("qwen", sharpness=4.0)
    with torch.no_grad():
        network.get_output_embeddings().weight[list(table("digit").roles.ending)] *= 3
    return network


@cache
def service() -> TinyTeacher:
    return teacher_of(model(), tokenizer("digit"))


def teacher() -> TeacherModel:
    client = TeacherClient("math", ["http://teacher"], transport=Recorded(service().app))
    return TeacherModel(client, table("digit"), max_top_k=448)


def student() -> StudentModel:
    own = Student(model(), tokenizer("digit"), CPU)
    return StudentModel(own, Sampler(own, GREEDY, seed=0))


async def test_a_teachers_greedy_completions_are_the_models() -> None:
    completions = await teacher().complete(PROMPTS, GREEDY, seed=0)
    assert completions == await student().complete(PROMPTS, GREEDY, seed=1)
    assert len({completion.text for completion in completions}) > 3
    assert len({completion.tokens for completion in completions}) > 1


@pytest.mark.parametrize("make", [teacher, student])
async def test_samples_depend_on_the_seed_and_a_small_nucleus_is_greedy(make) -> None:
    model = make()
    settings = GREEDY.model_copy(update={"temperature": 1.0, "max_new_tokens": 4})
    first = await model.complete(PROMPTS, settings, seed=3)
    assert first == await model.complete(PROMPTS, settings, seed=3)
    assert first != await model.complete(PROMPTS, settings, seed=4)
    narrow = settings.model_copy(update={"top_p": 1e-6})
    greedy = settings.model_copy(update={"temperature": 0.0})
    assert await model.complete(PROMPTS, narrow, seed=3) == await model.complete(
        PROMPTS, greedy, seed=0
    )


async def test_bits_per_byte_of_a_text_are_equal() -> None:
    config = EvaluationSetConfig(prompts=Path("x"), grader="log_likelihood")
    texts = ["the sum is 7", "ü 漢字", "42"]
    each = EvaluationSet.of("text", config, PROMPTS[:3], texts)
    results = [await evaluate_set(m, each, GREEDY, seed=0) for m in (student(), teacher())]
    own, other = (result.metrics()["bits_per_byte"] for result in results)
    assert own == pytest.approx(other, rel=1e-5)
    assert results[0].text_bytes == [len(text.encode()) for text in texts]


async def test_a_prompt_without_room_is_wrong_not_an_error() -> None:
    long = Prompt(index=0, messages=(Message(role="user", content="7 " * 5000),), teachers={})
    completions = await student().complete([long, PROMPTS[3]], GREEDY, seed=0)
    assert completions[0] == Completion("", 0, finished=False)
    assert completions[1:] == await student().complete([PROMPTS[3]], GREEDY, seed=0)


async def test_a_set_is_graded_per_prompt_sample_and_source() -> None:
    """Scores of a model that is right on even prompts, greedily, and on odd seeds."""

    class Even:
        async def complete(self, prompts, settings, *, seed):
            right = [p.index % 2 == 0 if settings.temperature == 0 else seed % 2 for p in prompts]
            return [Completion("yes" if each else "no", 2, finished=True) for each in right]

    lines = [
        Prompt(i, p.messages, {}, metadata={"data_source": "ab"[i % 2]})
        for i, p in enumerate(PROMPTS)
    ]
    config = EvaluationSetConfig(prompts=Path("x"), samples=4)
    each = EvaluationSet.of("x", config, lines, ["yes"] * len(lines))
    result: SetResult = await evaluate_set(Even(), each, GREEDY, seed=5)
    metrics = result.metrics()
    assert metrics["accuracy"] == 0.5
    assert metrics["source/a/accuracy"] == 1
    assert metrics["source/b/accuracy"] == 0
    right = sum(graded.score for graded in result.sampled[0])
    assert 0 < right < 4
    assert metrics["sampled_accuracy"] == metrics["pass_at_1"] == right / 4
    assert metrics["pass_at_4"] == 1
    assert {name for name in metrics if "pass" in name} == {"pass_at_1", "pass_at_2", "pass_at_4"}
