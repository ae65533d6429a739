"""A teacher that is the student has nothing to teach."""

import pytest

from mopd_losses.build import build_loss
from mopd_losses.config import CtkdConfig, TopKKlConfig
from mopd_protocol.samples import Prompt
from mopd_trainer.collection import collect
from mopd_trainer.config.run import RolloutConfig, StudentConfig
from mopd_trainer.data.packing import pack
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.training.learner import Learner
from tests.server.tiny_teachers import teacher_of
from tests.trainer.in_process import Recorded, scorer_of, teacher_config
from tests.trainer.students import CPU, MESSAGES, model_of, student_of, tokenizer

pytestmark = pytest.mark.anyio

PROMPTS = [Prompt(index=index, messages=MESSAGES, teachers={"math": 1.0}) for index in range(8)]


async def first_step(loss: TopKKlConfig | CtkdConfig, *, teacher_seed: int) -> dict[str, float]:
    """Return the metrics of one step on sampled completions, with a teacher of the same family."""
    student = student_of(sharpness=8)
    teacher = teacher_of(model_of("qwen", teacher_seed, sharpness=8), tokenizer("digit"))
    config = teacher_config(top_k=32, loss=loss.model_dump())
    async with scorer_of(student.identity, {"math": (Recorded(teacher.app), config)}) as scorer:
        rollout = RolloutConfig(max_new_tokens=16, generation_batch_size=4)
        examples, _ = await collect(PROMPTS, Sampler(student, rollout, seed=0), scorer, 0)
    learner = Learner(
        student,
        StudentConfig(model="tiny"),
        losses={"math": build_loss(loss, student.identity, student.identity, CPU)},
        teacher_weights={"math": 1.0},
        max_steps=1,
        seed=0,
    )
    tokens = sum(len(example.rollout.completion) for example in examples)
    metrics, _ = learner.update(pack(examples, tokens_per_micro_batch=100), tokens=tokens, step=0)
    return metrics


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
async def test_a_student_has_nothing_to_learn_from_itself(divergence: str) -> None:
    loss = TopKKlConfig.model_validate({"divergence": divergence})
    same = await first_step(loss, teacher_seed=0)
    assert abs(same["loss"]) < 1e-5
    assert same["grad_norm"] < 1e-4
    other = await first_step(loss, teacher_seed=1)
    assert other["loss"] > 0.1
    assert other["grad_norm"] > 0.1
