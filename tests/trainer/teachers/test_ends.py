"""A base student and an instruct teacher: one vocabulary, other tokens that end completions."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from mopd_losses.build import build_loss
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.ends.one_end_loss import OneEndLoss
from mopd_losses.projection.cache import ProjectionCache
from mopd_protocol.samples import Rollout
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.connect import Teacher
from mopd_trainer.teachers.connect import teacher_of as connected_teacher
from tests import tiny_models
from tests.server.tiny_teachers import TinyTeacher, teacher_of
from tests.trainer.in_process import Recorded, scorer_of, teacher_config
from tests.trainer.students import CPU, ids_of, model_of, rollout, tokenizer

pytestmark = pytest.mark.anyio

END, PAD = "<|end|>", "<|pad|>"
TOP_K = 32
LOSSES: dict[str, dict[str, Any]] = {
    "auto": {"top_k": 420},
    "student's ids": {
        "top_k": TOP_K,
        "support": "student_topk",
        "loss": {"type": "topk_kl", "divergence": "reverse_kl"},
    },
    "projected student's ids": {
        "top_k": TOP_K,
        "support": "student_topk",
        "loss": {"type": "ctkd", "divergence": "reverse_kl"},
    },
    "text": {"top_k": TOP_K, "loss": {"type": "k2"}},
}


def student_of() -> Student:
    return Student(model_of("qwen", sharpness=6.0), tokenizer("digit"), CPU)


def instruct() -> TinyTeacher:
    """The student's model, in which the other control token has the part of its end."""
    model = deepcopy(model_of("qwen", sharpness=6.0))
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight[[0, 1]] = weight[[1, 0]].clone()
    own = tiny_models.digit_tokenizer()
    own.eos_token, own.pad_token = PAD, END
    return teacher_of(model, own)


def sampled(student: Student, *pieces: str) -> Rollout:
    """A completion with the student's likely ids at each of its tokens."""
    ids = ids_of("digit", *pieces)
    prompt = student.prompt_token_ids(rollout("digit", ids).prompt.messages)
    rows = student.distributions(prompt, ids)
    return rollout("digit", ids, teachers={"math": 1.0}, topk_ids=rows.topk(TOP_K).indices.numpy())


async def test_a_likely_end_of_the_student_is_scored_as_the_teachers() -> None:
    student = student_of()
    (example,), _ = await scored(
        student, teacher_config(**LOSSES["student's ids"]), [sampled(student, "7 + 4 = 11", END)]
    )
    own, other = ids_of("digit", END, PAD)
    likely = example.rollout.student_topk_ids
    assert likely is not None
    ids = example.scores[0].score.topk.ids
    assert (likely == own).any()
    assert ((likely == own).any(axis=1) == (ids == other).any(axis=1)).all()
    assert ((likely == other).any(axis=1) == (ids == own).any(axis=1)).all()


async def scored(
    student: Student, config: TeacherConfig, rollouts: Sequence[Rollout]
) -> tuple[list[TrainingExample], Teacher]:
    teachers = {"math": (Recorded(instruct().app), config)}
    async with scorer_of(student.identity, teachers) as scorer:
        teacher = scorer._teachers["math"]  # pyright: ignore[reportPrivateUsage]
        return await scorer.score(rollouts), teacher


@pytest.mark.parametrize("name", LOSSES)
async def test_an_equal_model_that_ends_with_another_token_has_no_loss(name: str) -> None:
    student = student_of()
    rollouts = [
        sampled(student, "7 + 4", END),
        sampled(student, "cut"),
        # The token that ends the teacher's completions, inside the student's and before its end.
        sampled(student, "7", PAD, "4", PAD, END),
    ]
    rollouts = rollouts[: 2 if name in ("text", "projected student's ids") else 3]
    examples, teacher = await scored(student, teacher_config(**LOSSES[name]), rollouts)
    assert len(examples) == len(rollouts)
    ends = teacher.differing_ends()
    assert ends is not None
    assert END in ends
    assert PAD in ends
    loss = build_loss(teacher.config.loss, student.identity, teacher.tokenizer, CPU)
    for example in examples:
        (score,) = example.scores
        prompt = student.prompt_token_ids(example.rollout.prompt.messages)
        rows = student.distributions(prompt, example.rollout.completion.token_ids.tolist())
        pair = AlignedPair(
            example.rollout.completion, np.zeros(len(rows)), score.score, score.alignment
        )
        real = torch.tensor(student.table.real_ids(student.identity.logit_width))
        output = loss(DenseRows(rows, real), loss.targets([pair], [0]))
        assert output.per_token.abs().mean() < 1e-4


def test_a_student_and_its_own_copy_end_with_the_same_tokens() -> None:
    student = student_of()
    served = teacher_of(model_of("qwen"), tokenizer("digit"))
    teacher = connected_teacher(
        "copy",
        teacher_config(),
        served.service.manifest,
        served.tokenizer,
        student.identity,
        ProjectionCache(),
    )
    assert teacher.differing_ends() is None
    assert teacher.has_recommended_loss
    loss = build_loss(teacher.config.loss, student.identity, teacher.tokenizer, CPU)
    assert not isinstance(loss, OneEndLoss)
